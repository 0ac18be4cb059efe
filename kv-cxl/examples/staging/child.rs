//! A run in a process of its own, watched from outside: what it locks, what the device gives, whether it is killed.

use std::{
    env,
    error::Error,
    fs,
    io::Read as _,
    os::{linux::fs::MetadataExt as _, unix::process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use kv_staging::Reservation;
use serde_json::{Value, json};

use crate::{
    flash::{Flash, Real},
    lmcache::{Lmcache, Peer},
    policies::{ALL, Kind},
    real::{self, BUDGET_BYTES},
    rows::Run,
    serve::Server,
};

/// How often a child's locked bytes are looked at.
const SAMPLE: Duration = Duration::from_millis(5);
/// A run takes some seconds; LMCache's has to start first.
const RUN_MAX: Duration = Duration::from_secs(90);
const PEER_RUN_MAX: Duration = Duration::from_secs(450);
/// As the block layer counts.
const SECTOR_BYTES: u64 = 512;

/// What one child did, and what was seen of it.
pub(crate) struct Seen {
    pub(crate) run: Run,
    pub(crate) protected_bytes_max: u64,
    pub(crate) locked_bytes_end: u64,
    /// What the device was read, everything in it.
    pub(crate) device_read_bytes: u64,
    pub(crate) was_killed: bool,
}

/// Where runs take place.
pub(crate) struct Place {
    pub(crate) file: PathBuf,
    pub(crate) memory: PathBuf,
    pub(crate) io: PathBuf,
    pub(crate) rate_mib_s: String,
    pub(crate) lmcache: Option<Lmcache>,
}

impl Place {
    /// A policy of ours. It joins the cgroups before it runs: memory is charged to who first uses it.
    pub(crate) fn run(
        &self,
        policy: &str,
        reservation: Reservation,
        seed: u64,
    ) -> Result<Seen, Box<dyn Error>> {
        let mut command = first();
        command.args(["sh", "-c", "for c in \"$0\" \"$1\"; do echo $$ > \"$c/cgroup.procs\" || exit 9; done; shift; exec \"$@\""]);
        command.args([&self.memory, &self.io]).arg(env::current_exe()?);
        let reservation = if reservation == Reservation::Lazy { "lazy" } else { "eager" };
        command.args(["one", policy, reservation, &seed.to_string(), &self.rate_mib_s]);
        self.watch(policy, command.arg(&self.file), RUN_MAX)
    }

    /// LMCache, of which the process with its memory joins them by itself.
    pub(crate) fn run_peer(&self, lmcache: &Lmcache, seed: u64) -> Result<Seen, Box<dyn Error>> {
        let mut command = first();
        command.arg(env::current_exe()?);
        command.args(["peer", &seed.to_string(), &self.rate_mib_s]).arg(&self.file);
        command.args([&lmcache.python, &lmcache.script, &lmcache.log, &self.memory, &self.io]);
        self.watch("lmcache_dax", &mut command, PEER_RUN_MAX)
    }

    fn watch(
        &self,
        policy: &str,
        command: &mut Command,
        wait: Duration,
    ) -> Result<Seen, Box<dyn Error>> {
        let kills_before = oom_kills(&self.memory);
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let begun = Instant::now();
        let mut protected_bytes_max = 0;
        let status = loop {
            protected_bytes_max = protected_bytes_max.max(locked_bytes(&child.id().to_string()));
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if begun.elapsed() > wait {
                child.kill()?;
                return Err(format!("{policy}: still running after {wait:?}").into());
            }
            thread::sleep(SAMPLE);
        };
        let was_killed = status.signal() == Some(9) || oom_kills(&self.memory) > kills_before;
        let mut text = String::new();
        child.stdout.take().ok_or("no output")?.read_to_string(&mut text)?;
        let mut seen = Seen {
            run: Run::default(),
            protected_bytes_max,
            locked_bytes_end: 0,
            device_read_bytes: 0,
            was_killed,
        };
        if was_killed {
            return Ok(seen);
        }
        if !status.success() {
            return Err(format!("{policy}: {status}").into());
        }
        let value: Value = serde_json::from_str(&text)?;
        let number = |key: &str| value[key].as_u64().ok_or_else(|| format!("no {key}"));
        seen.locked_bytes_end = number("locked_bytes_end")?;
        seen.device_read_bytes = number("device_read_bytes")?;
        seen.run = Run::from_json(&value);
        Ok(seen)
    }
}

/// Runs a command before others: some milliseconds that a busy machine does not give are more than what is measured.
fn first() -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "-10"]);
    command
}

/// One run of ours, in the cgroups.
pub(crate) fn one(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [policy, reservation, seed, rate, file] = arguments else {
        return Err("one: five arguments".into());
    };
    let kind = ALL.iter().find(|(name, _)| name == policy).ok_or("no such policy")?.1;
    let reservation = if reservation == "lazy" { Reservation::Lazy } else { Reservation::Eager };
    let setting = real::setting(rate.parse()?);
    let workload = real::workload(&setting, seed.parse()?);
    let file = Path::new(file);
    let device = Flash::open(file, &workload.object_bytes, BUDGET_BYTES, setting.slots)?;
    let read_before = device_read_bytes(file)?;
    let server = Server::new(&setting, &workload, &kind, reservation, device);
    let (outcome, device) = server.run(&mut Real(Instant::now()));
    let read_bytes = device_read_bytes(file)? - read_before;
    let locked_bytes_end = locked_bytes("self");
    drop(device);
    tell(&Run::of(&outcome), locked_bytes_end, read_bytes);
    Ok(())
}

/// One run of LMCache's, whose own process is in the cgroups: the same requests, accelerator and order, each read when
/// it is wanted.
pub(crate) fn peer(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [seed, rate, file, python, script, log, memory, io] = arguments else {
        return Err("peer: eight arguments".into());
    };
    let setting = real::setting(rate.parse()?);
    let workload = real::workload(&setting, seed.parse()?);
    let lmcache = Lmcache { python: python.into(), script: script.into(), log: log.into() };
    let (file, cgroups) = (Path::new(file), [Path::new(memory), Path::new(io)]);
    let device = Peer::start(&lmcache, file, &workload.object_bytes, setting.slots, cgroups)?;
    let read_before = device_read_bytes(file)?;
    let server = Server::new(&setting, &workload, &Kind::Demand, Reservation::Eager, device);
    let (outcome, device) = server.run(&mut Real(Instant::now()));
    let read_bytes = device_read_bytes(file)? - read_before;
    let due: u64 = workload.requests.iter().map(|it| workload.object_bytes[it.object]).sum();
    let checked = device.end()?;
    if checked != due {
        return Err(format!("LMCache read {checked} of {due} bytes").into());
    }
    tell(&Run::of(&outcome), 0, read_bytes);
    Ok(())
}

fn tell(run: &Run, locked_bytes_end: u64, device_read_bytes: u64) {
    let mut value = run.to_json();
    value["locked_bytes_end"] = json!(locked_bytes_end);
    value["device_read_bytes"] = json!(device_read_bytes);
    println!("{value}");
}

/// Read so far from the device that the file is on.
fn device_read_bytes(file: &Path) -> Result<u64, Box<dyn Error>> {
    let device = fs::metadata(file)?.st_dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let path = format!("/sys/dev/block/{major}:{minor}/stat");
    let text = fs::read_to_string(&path).map_err(|error| format!("read {path}: {error}"))?;
    let sectors: u64 = text.split_whitespace().nth(2).ok_or("a stat without sectors")?.parse()?;
    Ok(sectors * SECTOR_BYTES)
}

/// Locked by a process; 0 if it is gone.
fn locked_bytes(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Of either version of cgroups.
fn oom_kills(cgroup: &Path) -> u64 {
    let read = |name: &str| fs::read_to_string(cgroup.join(name));
    let text = read("memory.events").or_else(|_| read("memory.oom_control")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}
