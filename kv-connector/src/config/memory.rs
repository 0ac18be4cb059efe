//! How much memory this process may use, as the system says it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{ByteSize, EngineError};

/// The smallest limit of the memory cgroups that this process is in, those above them included.
pub(crate) fn cgroup_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let unified = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let first = text.lines().find_map(|line| line.split_once(":memory:/").map(|(_, path)| path));
    let read = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let along = |root: &str, path: &str, file: &str| {
        let whole = Path::new(root).join(path);
        let above = whole.ancestors().take_while(|it| it.starts_with(root));
        above.filter_map(|it| read(it.join(file))).min()
    };
    let unified = along("/sys/fs/cgroup", unified.unwrap_or_default(), "memory.max");
    let older = along("/sys/fs/cgroup/memory", first.unwrap_or_default(), "memory.limit_in_bytes");
    // Without a limit version 1 says a huge number.
    unified.into_iter().chain(older).min().filter(|limit| *limit < 1 << 60)
}

/// What the process may use: the machine's memory, or what its cgroups give it.
pub(crate) fn limit() -> Option<u64> {
    cgroup_limit().into_iter().chain(total()).min()
}

/// Fails if `field` asks for so much that, with what is taken already, the system would end the process: all of it is
/// touched at once.
pub(crate) fn check(field: &str, wanted: u64, beside: u64) -> Result<(), EngineError> {
    let Some(limit) = limit().filter(|limit| wanted.saturating_add(beside) > *limit) else {
        return Ok(());
    };
    let (wanted, beside, limit) = (ByteSize(wanted), ByteSize(beside), ByteSize(limit));
    let problem = format!("{wanted} beside {beside}, and this process may use {limit} of memory");
    let fix = "write less, or smaller chunk_bytes_max and windows, which it follows by default";
    Err(EngineError::config(field, problem, fix))
}

/// Bytes of the machine's memory.
pub(crate) fn total() -> Option<u64> {
    meminfo("MemTotal:")
}

/// Bytes that could be had now.
pub(crate) fn available() -> Option<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}
