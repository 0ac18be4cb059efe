//! A throttled loop device, and a memory cgroup that is smaller than the file on it.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{build, keep, raw};
use crate::bench::{
    devices::{
        self,
        host::{Host, Missing},
        setup::Setup,
        signals::Signals,
        throttle::Throttle,
    },
    directory, write,
};
use crate::{
    engines::{self, Absent},
    run,
};

/// What the device gives.
const RATE_MIB_S: u64 = 125;
/// Fast memory: the budget of protected bytes, the heap, and some.
const MEMORY_MIB: u64 = 384;
/// The file and some, and a second device that nobody needs.
const SIZES: [u64; 2] = [1 << 30, 64 << 20];

/// On a real device; writes `staging-real.json`, and another copy if asked.
pub(in crate::bench) fn bench(options: &devices::Options) -> Result<()> {
    let host = match Host::look() {
        Ok(host) => host,
        Err(Missing(why)) => return skip(&why),
    };
    let Some(parent) = memory_hierarchy() else {
        return skip("no cgroup hierarchy with memory");
    };
    let program = build()?;
    let venv = engines::alone();
    if let Err(Absent(why)) = &venv {
        println!("SKIP lmcache_dax: {why}");
    }
    // Before any thread or child exists: they inherit which signals are blocked.
    let signals = Signals::listen()?;
    let setup = match Setup::new(&directory().join("devices"), &host, SIZES) {
        Ok(setup) => setup,
        Err(error) if error.is::<Missing>() => return skip(&format!("{error:#}")),
        Err(error) => return Err(error),
    };
    let device = &setup.devices()[0];
    Throttle::new(setup.cgroup()).limit(&device.number, RATE_MIB_S << 20)?;
    let memory = match Memory::new(&parent) {
        Ok(memory) => memory,
        Err(error) => return skip(&format!("{error:#}")),
    };
    let path = raw("staging-real")?;
    let mut command = Command::new(program);
    command.arg("real").arg("--file").arg(device.mount.join("flash"));
    command.arg("--memory-cgroup").arg(&memory.0).arg("--io-cgroup").arg(setup.cgroup());
    command.args(["--rate-mib-s", &RATE_MIB_S.to_string()]).arg("--json").arg(&path);
    if let Some(reps) = options.reps.or(options.quick.then_some(1)) {
        command.args(["--reps", &reps.to_string()]);
    }
    match &venv {
        Ok(venv) => lmcache(&mut command, venv)?,
        Err(Absent(why)) => _ = command.arg("--skipped").arg(why),
    }
    let status = devices::wait(&mut command, &signals)?;
    drop((memory, setup));
    ensure!(!signals.arrived(), "stopped by a signal");
    ensure!(status.success(), "staging real ended with {status}");
    keep("staging-real", &path, options.json.as_deref())
}

/// LMCache's own adapter is one of those compared.
fn lmcache(command: &mut Command, venv: &Path) -> Result<()> {
    let logs = run::root().join("target/xtask");
    fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    command.arg("--lmcache").arg(venv.join("bin/python"));
    command.arg("--script").arg(run::root().join("xtask/data/staging/dax.py"));
    command.arg("--log").arg(logs.join("bench-staging-lmcache.log"));
    // Compiled Python is kept from run to run: the engines' environment may come without.
    command.env("PYTHONPYCACHEPREFIX", directory().join("staging/bytecode"));
    command.envs([("LMCACHE_LOG_LEVEL", "WARNING"), ("LMCACHE_TRACK_USAGE", "false")]);
    command.envs([("PYTHONHASHSEED", "0"), ("HF_HUB_OFFLINE", "1")]);
    Ok(())
}

fn skip(why: &str) -> Result<()> {
    println!("SKIP staging --real: {why}");
    // What an earlier run measured must not be read as this one's; who may not write there has none.
    let skipped = json!([{"scenario": "all", "why": why}]);
    let _ = write("staging-real", json!({"results": [], "skipped": skipped, "parameters": {}}));
    Ok(())
}

/// Where memory cgroups are made, of either version.
fn memory_hierarchy() -> Option<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("memory/memory.limit_in_bytes").exists() {
        return Some(root.join("memory"));
    }
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).ok()?;
    controllers.split_whitespace().any(|name| name == "memory").then(|| root.to_owned())
}

/// A memory cgroup, gone when dropped.
struct Memory(PathBuf);

impl Memory {
    fn new(parent: &Path) -> Result<Self> {
        let path = parent.join("kvbraid-bench-memory");
        // What a killed run left.
        remove(&path);
        let control = parent.join("cgroup.subtree_control");
        if control.exists() {
            fs::write(&control, "+memory")
                .with_context(|| format!("write {}", control.display()))?;
        }
        fs::create_dir(&path).with_context(|| format!("make the cgroup {}", path.display()))?;
        let memory = Self(path);
        let limit = ["memory.limit_in_bytes", "memory.max"].map(|name| memory.0.join(name));
        let file = if limit[0].exists() { &limit[0] } else { &limit[1] };
        fs::write(file, (MEMORY_MIB << 20).to_string())
            .with_context(|| format!("write {}", file.display()))?;
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// A process that has just ended leaves it a moment later.
fn remove(path: &Path) {
    for _ in 0..50 {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                thread::sleep(Duration::from_millis(100));
            }
            _ => return,
        }
    }
    println!("taking down: {} is still in use", path.display());
}
