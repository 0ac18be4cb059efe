//! The index of an NVMe tier alone: its start, and memory, look-ups and what an eviction costs by the number of chunks.
//! No device is used, so nothing here depends on one.
//!
//! What grows with the number of chunks should be waiting for memory only: beside the figures stands what one read at a
//! random place costs in a block of memory as large as the index. The sizes take turns, so that what else the machine
//! does strikes all of them.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed benchmark")]
#![expect(clippy::print_stdout, reason = "figures are printed")]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use kv_chunk::Digest;
use kv_tiers::{NvmeConfig, NvmeTier, synthetic};
use nix::time::{ClockId, clock_gettime};

const SIZES: [u64; 3] = [10_000, 100_000, 1_000_000];
/// Turns of each size, and operations in a turn.
const TURNS: usize = 30;
const PER_TURN: u64 = 20_000;
/// Operations that are timed together for the slowest.
const GROUP: u64 = 100;

/// Time that this thread had a CPU: other work on the machine does not count, but for what it takes of the caches.
fn cpu_time() -> Duration {
    Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap())
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn start() {
    let chunks = SIZES[2];
    let directory =
        option_env!("CARGO_TARGET_TMPDIR").map_or_else(tempfile::tempdir, tempfile::tempdir_in);
    let directory = directory.unwrap();
    synthetic::store(directory.path(), chunks, 4096, 64).unwrap();
    let config = NvmeConfig::new("nvme", directory.path(), 16 << 30);
    let (began, cpu) = (Instant::now(), cpu_time());
    let tier = NvmeTier::open(config, &[], 0).unwrap();
    let (took, cpu) = (began.elapsed(), cpu_time() - cpu);
    drop(tier);
    println!("start of {chunks} chunks from a snapshot: {took:.3?}, of it {cpu:.3?} on a CPU");
}

/// A block of memory whose words lead from one to another in random order.
struct Chase {
    next: Vec<u32>,
    at: u32,
}

impl Chase {
    fn new(bytes: u64) -> Self {
        let count = u32::try_from(bytes / 4).unwrap();
        let mut next: Vec<u32> = (0..count).collect();
        let mut random = fastrand::Rng::with_seed(1);
        // One cycle through all (Sattolo).
        (1..next.len()).rev().for_each(|at| next.swap(at, random.usize(..at)));
        Self { next, at: 0 }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.at = self.next[self.at as usize];
        }
        black_box(self.at);
    }
}

/// A full index, and what its operations cost.
struct Size {
    chunks: u64,
    cache: synthetic::Cache,
    bytes_per_chunk: f64,
    number: u64,
    chase: Chase,
    evictions: Vec<Duration>,
    look_ups: Vec<Duration>,
    reads: Vec<Duration>,
    slowest: Duration,
}

impl Size {
    fn new(chunks: u64) -> Self {
        let before = resident_bytes();
        let mut cache = synthetic::Cache::new(chunks).unwrap();
        (0..chunks).for_each(|number| cache.write(number));
        let bytes = resident_bytes() - before;
        let mut this = Self {
            chunks,
            cache,
            bytes_per_chunk: bytes as f64 / chunks as f64,
            number: chunks,
            chase: Chase::new(bytes),
            evictions: Vec::new(),
            look_ups: Vec::new(),
            reads: Vec::new(),
            slowest: Duration::ZERO,
        };
        // As many again, so that every queue is as it will be.
        this.churn(chunks);
        this
    }

    /// Writes new chunks in the place of others; a third of them are used while they are held.
    fn churn(&mut self, count: u64) {
        for _ in 0..count {
            self.cache.write(self.number);
            if self.number.is_multiple_of(3) {
                self.cache.read(self.number - self.chunks / 4);
            }
            self.number += 1;
        }
    }

    fn turn(&mut self, random: &mut fastrand::Rng) {
        let cpu = cpu_time();
        for _ in 0..PER_TURN / GROUP {
            let before = cpu_time();
            self.churn(GROUP);
            self.slowest = self.slowest.max(cpu_time() - before);
        }
        self.evictions.push(cpu_time() - cpu);
        let digests: Vec<Digest> = (0..PER_TURN)
            .map(|_| synthetic::digest(self.number - 1 - random.u64(..self.chunks / 8)))
            .collect();
        let cpu = cpu_time();
        let held = digests.iter().filter(|digest| self.cache.contains(**digest)).count();
        self.look_ups.push(cpu_time() - cpu);
        assert!(held as u64 > PER_TURN * 9 / 10, "{held} of {PER_TURN} are held");
        let cpu = cpu_time();
        self.chase.run(PER_TURN);
        self.reads.push(cpu_time() - cpu);
    }

    fn print(&mut self) {
        println!(
            "{:>9} {:>15.0} {:>20.0} {:>12.1} {:>26.1} {:>16.0}",
            self.chunks,
            self.bytes_per_chunk,
            median(&mut self.evictions) * 1e9,
            1e-6 / median(&mut self.look_ups),
            self.slowest.as_secs_f64() * 1e6,
            median(&mut self.reads) * 1e9,
        );
    }
}

/// Seconds of one operation in the turn that is in the middle.
fn median(turns: &mut [Duration]) -> f64 {
    turns.sort_unstable();
    turns[turns.len() / 2].as_secs_f64() / PER_TURN as f64
}

fn main() {
    let mut sizes = SIZES.map(Size::new);
    let mut random = fastrand::Rng::with_seed(2);
    for _ in 0..TURNS {
        sizes.iter_mut().for_each(|size| size.turn(&mut random));
    }
    println!(
        "{:>9} {:>15} {:>20} {:>12} {:>26} {:>16}",
        "chunks",
        "bytes a chunk",
        "evict + write (ns)",
        "M look-ups/s",
        "slowest 100 writes (us)",
        "memory read (ns)"
    );
    sizes.iter_mut().for_each(Size::print);
    drop(sizes);
    start();
}
