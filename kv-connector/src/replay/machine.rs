//! Where and of what a figure was measured.

use std::{env, fs, process::Command, thread};

/// The machine in a line: processor, cores, memory, kernel.
pub fn machine() -> String {
    let line = |path: &str, name: &str| {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cpu = line("/proc/cpuinfo", "model name").unwrap_or_else(|| env::consts::ARCH.to_owned());
    let cores = thread::available_parallelism().map_or(0, usize::from);
    let memory = line("/proc/meminfo", "MemTotal")
        .and_then(|kib| kib.trim_end_matches(" kB").parse::<u64>().ok())
        .map_or_else(String::new, |kib| format!(", {} GiB", kib >> 20));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{cpu}, {cores} cores{memory}, Linux {}", kernel.trim())
}

/// The commit: `KVBRAID_COMMIT`, else what git says of the current directory, else `unknown`.
pub fn commit() -> String {
    if let Ok(commit) = env::var("KVBRAID_COMMIT") {
        return commit;
    }
    let said = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let said = said.ok().filter(|said| said.status.success());
    let commit = said.map(|said| String::from_utf8_lossy(&said.stdout).trim().to_owned());
    commit.filter(|commit| !commit.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}
