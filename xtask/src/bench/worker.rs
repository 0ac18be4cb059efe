//! One back end in a process of its own, told line by line what to do.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::bench::devices::signals::Signals;

/// How often the signals are looked at.
const LOOK: Duration = Duration::from_millis(100);
const CLOSE_WAIT: Duration = Duration::from_secs(10);

/// What every worker is started with.
pub(in crate::bench) struct Place<'a> {
    /// Whose logs they are.
    pub(in crate::bench) bench: &'static str,
    pub(in crate::bench) python: PathBuf,
    pub(in crate::bench) script: PathBuf,
    /// Where packages are that the environment of the engines lacks.
    pub(in crate::bench) packages: OsString,
    pub(in crate::bench) variables: &'a [(&'static str, &'static str)],
    /// Compiled Python, kept from run to run: the engines' environment may come without.
    pub(in crate::bench) bytecode: &'a Path,
    pub(in crate::bench) logs: &'a Path,
    pub(in crate::bench) cgroup: &'a Path,
    pub(in crate::bench) signals: &'a Signals,
}

/// Dropping it ends the process.
pub(in crate::bench) struct Worker<'a> {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    log: PathBuf,
    signals: &'a Signals,
}

impl<'a> Worker<'a> {
    /// Starts a process within the cgroup that throttles.
    pub(in crate::bench) fn start(place: &Place<'a>, name: &str) -> Result<Self> {
        let log = place.logs.join(format!("bench-{}-{name}.log", place.bench));
        let file = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(&place.python);
        command.arg("-W").arg("ignore").arg(&place.script);
        command.env("PYTHONPATH", &place.packages).env("PYTHONPYCACHEPREFIX", place.bytecode);
        command.envs([("LMCACHE_LOG_LEVEL", "WARNING"), ("LMCACHE_TRACK_USAGE", "false")]);
        command.envs([("PYTHONHASHSEED", "0"), ("HF_HUB_OFFLINE", "1")]);
        command.envs(place.variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().with_context(|| format!("run {command:?}"))?;
        let (orders, said) = (child.stdin.take(), child.stdout.take());
        let (orders, said) = orders.zip(said).context("no pipe to a worker")?;
        let (sender, answers) = channel();
        thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let worker = Self { child, orders, answers, log, signals: place.signals };
        let processes = place.cgroup.join("cgroup.procs");
        fs::write(&processes, worker.child.id().to_string())
            .with_context(|| format!("write {}", processes.display()))?;
        Ok(worker)
    }

    /// Has it do something; what it answers. After an error it is of no use any more.
    pub(in crate::bench) fn ask(&mut self, order: &Value, limit: Duration) -> Result<Value> {
        self.tell(order)?;
        self.answer(limit)
    }

    /// Has it begin; the answer is to be asked for.
    pub(in crate::bench) fn tell(&mut self, order: &Value) -> Result<()> {
        let sent = self.orders.write_all(format!("{order}\n").as_bytes());
        sent.with_context(|| format!("it has ended; see {}", self.log.display()))
    }

    /// What it answers to what it was told last.
    pub(in crate::bench) fn answer(&mut self, limit: Duration) -> Result<Value> {
        let end = Instant::now() + limit;
        let answer = loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(answer) => break answer,
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("it has ended; see {}", self.log.display())
                }
                Err(RecvTimeoutError::Timeout) if self.signals.arrived() => {
                    bail!("stopped by a signal")
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() > end => {
                    bail!("no answer within {} s", limit.as_secs())
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        let answer: Value = serde_json::from_str(&answer).context("an answer is no JSON")?;
        match answer["error"].as_str() {
            None => Ok(answer),
            Some(error) => bail!("{error} (see {})", self.log.display()),
        }
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        let told = self.orders.write_all(b"{\"do\":\"close\"}\n");
        let end = Instant::now() + CLOSE_WAIT;
        while told.is_ok() && Instant::now() < end && !self.signals.arrived() {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(LOOK / 5);
        }
        // It may have ended by now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
