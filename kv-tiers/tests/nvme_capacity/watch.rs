//! What a run does to the disk, seen from outside: space by `du` all the time, bytes by the kernel's account.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// What `du` may show, in thousandths of the cap.
const DU_PERMILLE: u64 = 1020;

/// Looks at a directory until it is stopped.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: JoinHandle<u64>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    most: AtomicU64,
}

/// As `du -s`; what vanishes meanwhile takes no space.
fn du(path: &Path) -> u64 {
    let own = fs::symlink_metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
    let Ok(entries) = fs::read_dir(path) else { return own };
    own + entries.flatten().map(|entry| du(&entry.path())).sum::<u64>()
}

impl Watch {
    pub(crate) fn start(directory: &Path) -> Self {
        let shared = Arc::new(Shared::default());
        let (theirs, directory) = (Arc::clone(&shared), directory.to_owned());
        let thread = thread::spawn(move || {
            let mut samples = 0;
            while !theirs.stop.load(Ordering::Relaxed) {
                theirs.most.fetch_max(du(&directory), Ordering::Relaxed);
                samples += 1;
                thread::sleep(Duration::from_millis(1));
            }
            samples
        });
        Self { shared, thread }
    }

    /// The most that was seen so far.
    pub(crate) fn most(&self) -> u64 {
        self.shared.most.load(Ordering::Relaxed)
    }

    /// Fails if more than the cap allows was ever seen.
    pub(crate) fn check(&self, cap: u64) {
        let most = self.most();
        assert!(most * 1000 <= cap * DU_PERMILLE, "{most} bytes on the disk, the cap is {cap}");
    }

    /// The most that was seen, in how many looks.
    pub(crate) fn stop(self) -> (u64, u64) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.join().unwrap();
        (self.shared.most.load(Ordering::Relaxed), samples)
    }
}

/// Bytes that this process has had written to a disk; `None` where the kernel does not say, or the disk is memory.
pub(crate) fn written_to_disk() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/io").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "))?;
    line.trim().parse().ok().filter(|bytes| *bytes > 0)
}
