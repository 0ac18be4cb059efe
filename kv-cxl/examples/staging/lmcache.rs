//! LMCache's own adapter for Device-DAX as the device: demand access, in a process of its own.

use std::{
    error::Error,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use kv_staging::ClaimId;
use serde_json::{Value, json};

use crate::device::{Device, Event};

/// How often answers are looked for.
const LOOK_NS: u64 = 1_000_000;
/// Its imports, and a copy of every object.
const START_MAX: Duration = Duration::from_secs(300);
const END_MAX: Duration = Duration::from_secs(60);

/// What runs LMCache.
#[derive(Clone, Debug)]
pub(crate) struct Lmcache {
    pub(crate) python: PathBuf,
    pub(crate) script: PathBuf,
    /// What it says on standard error.
    pub(crate) log: PathBuf,
}

/// LMCache with all objects stored, none of them in memory.
pub(crate) struct Peer {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<Value>,
    reading: usize,
    log: PathBuf,
}

impl Peer {
    /// It joins the cgroups when its own memory has been used and the objects are stored.
    pub(crate) fn start(
        lmcache: &Lmcache,
        file: &Path,
        object_bytes: &[u64],
        readers: usize,
        cgroups: [&Path; 2],
    ) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(&lmcache.python);
        command.args(["-W", "ignore"]).arg(&lmcache.script).arg("--file").arg(file);
        command.args(["--objects", &object_bytes.len().to_string()]);
        command.args(["--object-bytes", &object_bytes[0].to_string()]);
        command.args(["--readers", &readers.to_string()]);
        cgroups.iter().for_each(|cgroup| {
            command.arg("--cgroup").arg(cgroup);
        });
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&lmcache.log)?);
        let mut child = command.spawn()?;
        let (orders, said) = (child.stdin.take(), child.stdout.take().ok_or("no pipe")?);
        let (tell, answers) = channel();
        thread::spawn(move || {
            let lines = BufReader::new(said).lines().map_while(Result::ok);
            for answer in lines.filter_map(|line| serde_json::from_str(&line).ok()) {
                if tell.send(answer).is_err() {
                    return;
                }
            }
        });
        let peer = Self { child, orders, answers, reading: 0, log: lmcache.log.clone() };
        let ready = peer.answer(START_MAX)?;
        // Pages of the kernel's may be larger than what is asked to go.
        let resident_bytes = ready["resident_bytes"].as_u64().unwrap_or(u64::MAX);
        if resident_bytes * 100 > object_bytes.iter().sum() {
            return Err(format!("{resident_bytes} bytes stayed in memory").into());
        }
        Ok(peer)
    }

    fn answer(&self, wait: Duration) -> Result<Value, Box<dyn Error>> {
        let log = self.log.display();
        let answer =
            self.answers.recv_timeout(wait).map_err(|error| format!("{error}; see {log}"))?;
        match answer["error"].as_str() {
            None => Ok(answer),
            Some(error) => Err(format!("{error}; see {log}").into()),
        }
    }

    /// Ends it; how many bytes it read and found right.
    pub(crate) fn end(mut self) -> Result<u64, Box<dyn Error>> {
        drop(self.orders.take());
        let checked = self.answer(END_MAX)?["checked_bytes"].as_u64();
        Ok(checked.ok_or("no checked_bytes")?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Nothing of it is needed any more; it may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Device for Peer {
    fn stage(&mut self, _object: usize, _now_ns: u64) -> u64 {
        unreachable!("LMCache stages nothing, and who never protects does not ask for it")
    }

    fn unprotect(&mut self, _object: usize, _now_ns: u64) {
        unreachable!("nothing is protected")
    }

    fn retrieve(&mut self, claim: ClaimId, object: usize, _now_ns: u64) -> u64 {
        let line = format!("{}\n", json!({"claim": claim.0, "object": object}));
        let orders = self.orders.as_mut().expect("it has not been ended");
        if let Err(error) = orders.write_all(line.as_bytes()) {
            panic!("LMCache takes no orders: {error}; see {}", self.log.display());
        }
        self.reading += 1;
        0
    }

    fn is_resident(&self, _object: usize) -> bool {
        false
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<Event>) -> Option<u64> {
        while let Ok(answer) = self.answers.try_recv() {
            self.reading -= 1;
            match answer["claim"].as_u64() {
                Some(claim) => events.push(Event::Retrieved(ClaimId(claim))),
                None => panic!("LMCache: {answer}; see {}", self.log.display()),
            }
        }
        (self.reading > 0).then_some(now_ns + LOOK_NS)
    }
}
