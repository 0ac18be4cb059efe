//! Limits of the devices, and what they count.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// A cgroup that limits reads, in either version.
pub(in crate::bench) struct Throttle {
    directory: PathBuf,
    is_first: bool,
}

/// What one device has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::bench) struct Counts {
    /// Bytes read, as the throttle charged them: what is charged twice is seen.
    pub(in crate::bench) charged: u64,
    /// Read requests that it completed.
    pub(in crate::bench) requests: u64,
}

impl Throttle {
    pub(in crate::bench) fn new(directory: &Path) -> Self {
        let is_first = directory.join("blkio.throttle.read_bps_device").exists();
        Self { directory: directory.to_owned(), is_first }
    }

    /// Limits the reads of a device (`7:0`); 0 removes the limit.
    pub(in crate::bench) fn limit(&self, device: &str, bytes_per_s: u64) -> Result<()> {
        let (file, line) = limit_line(self.is_first, device, bytes_per_s);
        let path = self.directory.join(file);
        fs::write(&path, &line).with_context(|| format!("write `{line}` to {}", path.display()))
    }

    pub(in crate::bench) fn counts(&self, device: &str) -> Result<Counts> {
        let file = if self.is_first { "blkio.throttle.io_service_bytes" } else { "io.stat" };
        let charged = charged_in(self.is_first, &read(&self.directory.join(file))?, device);
        let stat = read(&Path::new("/sys/dev/block").join(device).join("stat"))?;
        let requests = stat.split_whitespace().next().and_then(|it| it.parse().ok());
        Ok(Counts { charged, requests: requests.context("a device's stat has no numbers")? })
    }
}

impl Counts {
    pub(in crate::bench) fn since(self, before: Self) -> Self {
        Self {
            charged: self.charged.saturating_sub(before.charged),
            requests: self.requests.saturating_sub(before.requests),
        }
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

fn limit_line(is_first: bool, device: &str, bytes_per_s: u64) -> (&'static str, String) {
    match (is_first, bytes_per_s) {
        (true, limit) => ("blkio.throttle.read_bps_device", format!("{device} {limit}")),
        (false, 0) => ("io.max", format!("{device} rbps=max")),
        (false, limit) => ("io.max", format!("{device} rbps={limit}")),
    }
}

/// A device that is not listed was not read.
fn charged_in(is_first: bool, text: &str, device: &str) -> u64 {
    let line = |line: &str| {
        let rest = line.strip_prefix(device)?.strip_prefix(' ')?;
        let number = if is_first {
            rest.strip_prefix("Read ")
        } else {
            rest.split(' ').find_map(|part| part.strip_prefix("rbytes="))
        };
        number?.trim().parse().ok()
    };
    text.lines().find_map(line).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_read_of_the_device_only() {
        let one = "7:10 Read 5\n7:1 Read 90\n7:1 Write 4096\nTotal 9\n";
        let two = "254:0 rbytes=1 wbytes=2\n7:1 rbytes=90 wbytes=4096 rios=1\n";
        for (is_first, text) in [(true, one), (false, two)] {
            assert_eq!(charged_in(is_first, text, "7:1"), 90);
            assert_eq!(charged_in(is_first, text, "7:2"), 0);
        }
    }

    #[test]
    fn limits_are_set_and_removed() {
        assert_eq!(limit_line(true, "7:1", 300).1, "7:1 300");
        assert_eq!(limit_line(true, "7:1", 0).1, "7:1 0");
        assert_eq!(limit_line(false, "7:1", 300).1, "7:1 rbps=300");
        assert_eq!(limit_line(false, "7:1", 0).1, "7:1 rbps=max");
    }
}
