//! What a figure was measured on.

use std::{fs, thread};

use serde_json::{Value, json};
use xshell::{Shell, cmd};

use crate::run;

/// Processor, memory and kernel.
pub(crate) fn describe() -> Value {
    let field = |path: &str, key: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "processor": field("/proc/cpuinfo", "model name"),
        "cores": thread::available_parallelism().map_or(0, usize::from),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": kernel.trim(),
    })
}

/// The commit, with `-dirty` where the tree differs from it; empty without git.
pub(crate) fn commit() -> String {
    let Ok(shell) = Shell::new() else { return String::new() };
    shell.change_dir(run::root());
    cmd!(shell, "git describe --always --dirty --abbrev=12")
        .quiet()
        .ignore_stderr()
        .read()
        .unwrap_or_default()
}
