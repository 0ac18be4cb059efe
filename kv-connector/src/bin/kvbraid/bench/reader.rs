//! Another job on a device: a process that reads a file at a steady rate.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use kv_tiers::{Arena, ArenaConfig, Slot};
use nix::fcntl::OFlag;

use super::counters::read_by;
use crate::failure::Failure;

/// Within what the throttle charges once, whatever the memory.
const REQUEST_BYTES: usize = 512 << 10;
/// Enough to hold its rate behind another reader's queue.
const THREADS: u32 = 24;
/// What is read over and over, past all caches.
const FILE_BYTES: u64 = 256 << 20;
/// Reads that are later than this are given up: a job that was held up does not read faster afterwards for long.
const LATE_MAX: Duration = Duration::from_millis(500);

/// Reads a file at a steady rate until its standard input ends.
#[derive(Args)]
pub(super) struct Reader {
    /// What to read, over and over.
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// How fast, in MB/s.
    #[arg(long, value_name = "N")]
    mbps: u32,
}

impl Reader {
    pub(super) fn run(self) -> Result<(), Failure> {
        let failed = |what: &str, error: &dyn std::error::Error| {
            Failure::failed(format!("{what} {}: {error}", self.file.display()))
        };
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(OFlag::O_DIRECT.bits()).open(&self.file);
        let file = file.map_err(|error| failed("open", &error))?;
        let requests =
            file.metadata().map_err(|error| failed("stat", &error))?.len() / REQUEST_BYTES as u64;
        if self.mbps == 0 || requests == 0 {
            return Err(Failure::usage("--mbps: give 1 or more, and a file of 512 KiB or more"));
        }
        let arena = Arena::new(ArenaConfig::new(REQUEST_BYTES, THREADS as usize))
            .map_err(|error| failed("memory to read", &error))?;
        let period = Duration::from_secs_f64(
            f64::from(THREADS) * REQUEST_BYTES as f64 / f64::from(self.mbps) / 1e6,
        );
        // Set when the standard input ends, read by all threads; nothing is published with it.
        let stop = AtomicBool::new(false);
        let outcome = thread::scope(|scope| {
            let (file, stop) = (&file, &stop);
            let read = |thread: u32| {
                let slot = arena.try_take();
                scope.spawn(move || {
                    slot.map_or(Ok(()), |slot| pace(file, slot, thread, requests, period, stop))
                })
            };
            let threads: Vec<_> = (0..THREADS).map(read).collect();
            let _ = io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
        });
        outcome.map_err(|error: io::Error| failed("read", &error))
    }
}

/// One request each `period`, threads taking turns.
fn pace(
    file: &File,
    mut slot: Slot,
    thread: u32,
    requests: u64,
    period: Duration,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut due = Instant::now() + period * thread / THREADS;
    let mut request = u64::from(thread);
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        file.read_exact_at(&mut slot[..REQUEST_BYTES], request % requests * REQUEST_BYTES as u64)?;
        request += u64::from(THREADS);
        due = (due + period).max(Instant::now().checked_sub(LATE_MAX).unwrap_or(due));
    }
    Ok(())
}

/// The process that [`Reader`] runs in. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Colocated(Child);

impl Colocated {
    /// Reads a file in `directory`, which is made if absent.
    pub(super) fn start(directory: &Path, mbps: u32) -> Result<Self, Failure> {
        let file = directory.join("colocated.bin");
        make(&file, FILE_BYTES)?;
        let program = env::current_exe();
        let child = program.and_then(|program| {
            let mut command = Command::new(program);
            command.args(["bench", "reader", "--mbps", &mbps.to_string(), "--file"]).arg(&file);
            command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()
        });
        child.map(Self).map_err(|error| Failure::failed(format!("start the reader: {error}")))
    }

    /// What it has read so far; an error if it has ended.
    pub(super) fn read_bytes(&mut self) -> Result<u64, Failure> {
        match self.0.try_wait() {
            Ok(None) => read_by(self.0.id()),
            _ => Err(Failure::failed("the co-located reader ended")),
        }
    }
}

impl Drop for Colocated {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A file that is written everywhere: what is only allocated reads at the speed of memory.
pub(super) fn make(path: &Path, bytes: u64) -> Result<(), Failure> {
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() == bytes) {
        return Ok(());
    }
    let write = || {
        let mut file = File::create(path)?;
        let block = vec![0x5a; 1 << 20];
        let mut left = bytes;
        while left > 0 {
            let part = left.min(1 << 20);
            file.write_all(&block[..usize::try_from(part).unwrap_or(block.len())])?;
            left -= part;
        }
        file.sync_all()
    };
    write().map_err(|error: io::Error| {
        Failure::failed(format!("cannot write {}: {error}", path.display()))
    })
}
