//! Asks the system what the device under a directory takes in one request.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use nix::sys::stat::{major, minor};

/// Pages are scattered: a request of this size is taken whole by the devices we met (254 segments or more).
const SMALL_PAGE_REQUEST_BYTES: u64 = 512 << 10;
/// One segment a huge page: larger requests bring nothing more.
const HUGE_PAGE_REQUEST_BYTES: u64 = 1280 << 10;
const PAGE_BYTES: u64 = 4096;

/// Largest requests that the device takes without cutting them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestLimits {
    /// From memory on 4 KiB pages.
    pub(crate) small_page_bytes: usize,
    /// From memory on huge pages.
    pub(crate) huge_page_bytes: usize,
}

impl RequestLimits {
    /// The limits of the device that holds `directory`; fixed values where sysfs tells none (network file systems,
    /// tmpfs, containers without /sys). `override_bytes` replaces both.
    pub(crate) fn of(directory: &Path, override_bytes: Option<u64>) -> Self {
        let queue = queue_limits(directory);
        let device = queue.map_or(u64::MAX, |(bytes, _)| bytes);
        let scattered = queue.map_or(u64::MAX, |(_, segments)| segments.saturating_mul(PAGE_BYTES));
        let choose = |default: u64| {
            let bytes = override_bytes.unwrap_or_else(|| default.min(device));
            whole_pages(bytes.min(1 << 30))
        };
        Self {
            small_page_bytes: choose(SMALL_PAGE_REQUEST_BYTES.min(scattered)),
            huge_page_bytes: choose(HUGE_PAGE_REQUEST_BYTES),
        }
    }
}

fn whole_pages(bytes: u64) -> usize {
    let bytes = (bytes - bytes % PAGE_BYTES).max(PAGE_BYTES);
    usize::try_from(bytes).unwrap_or(4096)
}

/// Largest request in bytes and largest number of segments of the block device under `directory`.
fn queue_limits(directory: &Path) -> Option<(u64, u64)> {
    let device = fs::metadata(directory).ok()?.dev();
    let node = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A partition has no queue of its own; its disk is the directory above.
    ["queue", "../queue"].iter().find_map(|queue| {
        let read = |name: &str| {
            let text = fs::read_to_string(format!("{node}/{queue}/{name}")).ok()?;
            text.trim().parse::<u64>().ok().filter(|&value| value > 0)
        };
        Some((read("max_sectors_kb")?.saturating_mul(1024), read("max_segments")?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_whole_pages_within_the_device() {
        for directory in ["/tmp", "/dev/shm", "/proc", "/no such directory"] {
            let limits = RequestLimits::of(Path::new(directory), None);
            for bytes in [limits.small_page_bytes, limits.huge_page_bytes] {
                assert!(bytes >= 4096 && bytes % 4096 == 0 && bytes <= 1280 << 10, "{directory}");
            }
        }
    }

    #[test]
    fn an_override_is_rounded_to_pages() {
        let limits = RequestLimits::of(Path::new("/"), Some(10_000));
        assert_eq!(limits.small_page_bytes, 8192);
        assert_eq!(RequestLimits::of(Path::new("/"), Some(1)).huge_page_bytes, 4096);
    }
}
