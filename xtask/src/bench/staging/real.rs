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

/// What the device gives.
const RATE_MIB_S: u64 = 125;
/// Fast memory: the budget of protected bytes, the heap, and some.
const MEMORY_MIB: u64 = 384;
/// The file and some, and a second device that nobody needs.
const SIZES: [u64; 2] = [1 << 30, 64 << 20];

/// On a real device; writes `staging-real.json`, and `json` if given.
pub(in crate::bench) fn bench(reps: Option<u32>, json: Option<&Path>) -> Result<()> {
    let host = match Host::look() {
        Ok(host) => host,
        Err(Missing(why)) => return skip(&why),
    };
    let Some(parent) = memory_hierarchy() else {
        return skip("no cgroup hierarchy with memory");
    };
    let program = build()?;
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
    if let Some(reps) = reps {
        command.args(["--reps", &reps.to_string()]);
    }
    let status = devices::wait(&mut command, &signals)?;
    drop((memory, setup));
    ensure!(!signals.arrived(), "stopped by a signal");
    ensure!(status.success(), "staging real ended with {status}");
    keep("staging-real", &path, json)
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
