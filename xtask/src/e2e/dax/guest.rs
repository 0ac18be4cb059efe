//! One boot of the guest, read from its serial line, and killed when told to.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// What boots.
pub(super) struct Boot {
    pub(super) qemu: PathBuf,
    pub(super) kernel: PathBuf,
    pub(super) image: PathBuf,
    /// The file that is the NVDIMM's memory.
    pub(super) memory: PathBuf,
    pub(super) memory_bytes: u64,
    /// What the guest is told on its command line.
    pub(super) words: String,
}

/// What it said.
pub(super) struct Log {
    pub(super) text: String,
    /// Before it ended by itself.
    pub(super) killed: bool,
    pub(super) took: Duration,
}

impl Log {
    pub(super) fn has(&self, word: &str) -> bool {
        self.text.contains(word)
    }

    /// The last lines.
    pub(super) fn tail(&self) -> String {
        let lines: Vec<&str> = self.text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Boot {
    /// Runs until it ends, a line is one at which to kill it, or `limit` is over.
    pub(super) fn run(&self, limit: Duration, kill_at: impl Fn(&str) -> bool) -> Result<Log> {
        let begun = Instant::now();
        let mut child = self
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("start {}", self.qemu.display()))?;
        let output = child.stdout.take().context("its output is piped")?;
        let (tell, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        let mut log = Log { text: String::new(), killed: false, took: Duration::ZERO };
        loop {
            match lines.recv_timeout(limit.saturating_sub(begun.elapsed())) {
                Ok(line) => {
                    log.text += &line;
                    log.text.push('\n');
                    // At once and by force: nothing is flushed, closed or told.
                    if kill_at(&line) {
                        log.killed = true;
                        child.kill()?;
                        break;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    child.kill()?;
                    break;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        child.wait()?;
        // What it said before it was killed.
        for line in lines {
            log.text += &line;
            log.text.push('\n');
        }
        log.took = begun.elapsed();
        Ok(log)
    }

    fn command(&self) -> Command {
        let (memory, bytes) = (self.memory.display(), self.memory_bytes);
        let mut command = Command::new(&self.qemu);
        command.args(["-accel", "tcg,thread=multi", "-machine", "q35,nvdimm=on", "-smp", "2"]);
        command.args(["-m", "1G,slots=2,maxmem=4G", "-nodefaults", "-no-user-config"]);
        command.args(["-nographic", "-serial", "stdio", "-monitor", "none", "-no-reboot"]);
        // With an instruction that the tests' flushes would use on a server.
        command.args(["-nic", "none", "-cpu", "qemu64,+clwb"]);
        command.arg("-object").arg(format!(
            "memory-backend-file,id=memory,share=on,mem-path={memory},size={bytes},align=2M"
        ));
        command.args(["-device", "nvdimm,memdev=memory,id=nvdimm"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.image);
        // Hot-added memory stays offline, so that it can be taken back from the system.
        let quiet = "console=ttyS0 quiet loglevel=1 panic=-1 mitigations=off nokaslr tsc=reliable";
        command.arg("-append").arg(format!("{quiet} memhp_default_state=offline {}", self.words));
        command
    }
}
