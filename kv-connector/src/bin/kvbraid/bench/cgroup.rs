//! The cgroup that throttles: its limits and its counters, in either version.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

use crate::failure::Failure;

/// A cgroup that can limit the reads of block devices.
#[derive(Clone, Debug)]
pub(super) struct Cgroup {
    directory: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    /// blkio: requests that the device takes in two parts are charged twice.
    One,
    /// io: every request is counted once.
    Two,
}

impl Cgroup {
    pub(super) fn open(directory: &Path) -> Result<Self, Failure> {
        let has = |file: &str| directory.join(file).exists();
        let version = if has("blkio.throttle.read_bps_device") {
            Version::One
        } else if has("io.max") {
            Version::Two
        } else {
            let directory = directory.display();
            return Err(Failure::usage(format!(
                "--cgroup: {directory} has neither blkio.throttle.read_bps_device nor io.max"
            )));
        };
        Ok(Self { directory: directory.to_owned(), version })
    }

    /// Moves this process into it; children follow.
    pub(super) fn enter(&self) -> Result<(), Failure> {
        self.write("cgroup.procs", &process::id().to_string())
    }

    /// Limits the reads of a device; `None` removes the limit.
    pub(super) fn limit(&self, device: &str, bytes_per_s: Option<u64>) -> Result<(), Failure> {
        let (file, line) = limit_line(self.version, device, bytes_per_s);
        self.write(file, &line)
    }

    /// Bytes read from a device since the cgroup was made, as the throttle charged them.
    pub(super) fn charged(&self, device: &str) -> Result<u64, Failure> {
        let file = match self.version {
            Version::One => "blkio.throttle.io_service_bytes",
            Version::Two => "io.stat",
        };
        let path = self.directory.join(file);
        let text = fs::read_to_string(&path)
            .map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
        Ok(charged_in(self.version, &text, device))
    }

    fn write(&self, file: &str, text: &str) -> Result<(), Failure> {
        let path = self.directory.join(file);
        fs::write(&path, text).map_err(|error| {
            Failure::failed(format!("cannot write `{text}` to {}: {error}", path.display()))
        })
    }
}

fn limit_line(version: Version, device: &str, bytes_per_s: Option<u64>) -> (&'static str, String) {
    match (version, bytes_per_s) {
        (Version::One, limit) => {
            ("blkio.throttle.read_bps_device", format!("{device} {}", limit.unwrap_or(0)))
        }
        (Version::Two, Some(limit)) => ("io.max", format!("{device} rbps={limit}")),
        (Version::Two, None) => ("io.max", format!("{device} rbps=max")),
    }
}

/// A device that is not listed was not read.
fn charged_in(version: Version, text: &str, device: &str) -> u64 {
    let mut lines = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(device)?.strip_prefix(' ')?;
        match version {
            Version::One => rest.strip_prefix("Read ")?.trim().parse().ok(),
            Version::Two => {
                rest.split(' ').find_map(|part| part.strip_prefix("rbytes="))?.parse().ok()
            }
        }
    });
    lines.next().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "7:10 Read 5\n7:1 Read 903872512\n7:1 Write 4096\n7:1 Sync 0\n7:1 Total 903876608\n\
        Total 903876613\n";
    const TWO: &str = "254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n\
        7:1 rbytes=903872512 wbytes=4096 rios=1724 wios=1 dbytes=0 dios=0\n";

    #[test]
    fn charged_bytes_are_those_of_the_device_and_of_reads() {
        for (version, text) in [(Version::One, ONE), (Version::Two, TWO)] {
            assert_eq!(charged_in(version, text, "7:1"), 903_872_512);
            assert_eq!(charged_in(version, text, "7:2"), 0);
            assert_eq!(charged_in(version, "", "7:1"), 0);
        }
    }

    #[test]
    fn limits_are_set_and_removed() {
        let line = |version, limit| limit_line(version, "7:1", limit).1;
        assert_eq!(line(Version::One, Some(300)), "7:1 300");
        assert_eq!(line(Version::One, None), "7:1 0");
        assert_eq!(line(Version::Two, Some(300)), "7:1 rbps=300");
        assert_eq!(line(Version::Two, None), "7:1 rbps=max");
    }

    #[test]
    fn a_directory_that_cannot_throttle_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Cgroup::open(directory.path()).is_err());
        fs::write(directory.path().join("io.max"), "").unwrap();
        let cgroup = Cgroup::open(directory.path()).unwrap();
        cgroup.limit("7:1", Some(5)).unwrap();
        let text = fs::read_to_string(directory.path().join("io.max")).unwrap();
        assert_eq!(text, "7:1 rbps=5");
    }
}
