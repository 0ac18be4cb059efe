//! The kernel and what it lets this process do.

use std::fs;

use nix::sys::utsname::uname;

use super::Diagnosis;

/// The first kernel with all requests that are used.
const KERNEL_LEAST: (u32, u32) = (5, 6);
/// Before this registered buffers count against RLIMIT_MEMLOCK a second time.
const KERNEL_GOOD: (u32, u32) = (5, 15);
const IPC_LOCK_BIT: u32 = 14;

pub(super) fn examine(diagnosis: &mut Diagnosis) {
    kernel(diagnosis);
    let what = "io_uring";
    let why =
        "reads and writes go through threads: more CPU time and latency for the same bandwidth";
    match io_uring_disabled() {
        Some(2) => diagnosis.warn(
            what,
            "kernel.io_uring_disabled = 2: switched off for everybody",
            (why, "sysctl -w kernel.io_uring_disabled=0 (on the host, for a container)"),
        ),
        Some(1) => diagnosis.warn(
            what,
            "kernel.io_uring_disabled = 1: for the group kernel.io_uring_group only",
            (why, "sysctl -w kernel.io_uring_disabled=0, or add the user to that group"),
        ),
        _ if has_seccomp() => diagnosis.ok(
            what,
            "no sysctl forbids it; a seccomp filter is in force, see `io` of the tiers for what it allows",
        ),
        _ => diagnosis.ok(what, "no sysctl and no seccomp filter forbids it"),
    }
}

fn kernel(diagnosis: &mut Diagnosis) {
    let release = uname()
        .map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into_owned());
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        diagnosis.warn("kernel", format!("`{release}`"), ("its version cannot be told", ""));
        return;
    };
    let fix = "a kernel of 5.15 or later";
    if (major, minor) < KERNEL_LEAST {
        let why = "io_uring lacks requests that are needed: threads are used instead";
        diagnosis.warn("kernel", release, (why, fix));
    } else if (major, minor) < KERNEL_GOOD {
        let why = "io_uring of this kernel is slower, and its registered buffers may be refused";
        diagnosis.warn("kernel", release, (why, fix));
    } else {
        diagnosis.ok("kernel", release);
    }
}

/// The sysctl, where there is one (Linux 6.6).
pub(super) fn io_uring_disabled() -> Option<u32> {
    fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?.trim().parse().ok()
}

/// Whether system calls are filtered, as containers do.
pub(super) fn has_seccomp() -> bool {
    status("Seccomp").is_some_and(|mode| mode != "0")
}

/// Whether this process may lock as much memory as it likes.
pub(super) fn may_lock_memory() -> bool {
    let effective = status("CapEff").and_then(|bits| u64::from_str_radix(&bits, 16).ok());
    effective.is_some_and(|bits| bits >> IPC_LOCK_BIT & 1 == 1)
}

/// A field of what the kernel says of this process.
fn status(field: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}
