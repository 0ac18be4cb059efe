//! What processes read and what they use of the processors, as the system counts it.

use std::{fs, time::Duration};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

use crate::failure::Failure;

/// CPU time of this process so far, all threads, user and system.
pub(super) fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    let microseconds = (usage.user_time() + usage.system_time()).num_microseconds();
    Duration::from_micros(u64::try_from(microseconds).unwrap_or(0))
}

/// Bytes that a process has had read from block devices: counted where it hands a request over, before any throttle
/// and before any cutting.
pub(super) fn read_by(process: u32) -> Result<u64, Failure> {
    let path = format!("/proc/{process}/io");
    let text = fs::read_to_string(&path)
        .map_err(|error| Failure::failed(format!("cannot read {path}: {error}")))?;
    read_bytes_in(&text)
        .ok_or_else(|| Failure::failed(format!("{path} has no line `read_bytes: N`")))
}

fn read_bytes_in(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_from_block_devices_are_not_those_of_system_calls() {
        let text = "rchar: 5\nwchar: 6\nread_bytes: 903872512\nwrite_bytes: 7\n";
        assert_eq!(read_bytes_in(text), Some(903_872_512));
        assert_eq!(read_bytes_in("rchar: 5\n"), None);
    }
}
