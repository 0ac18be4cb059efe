//! The index of an NVMe tier alone: memory, look-ups, and what an eviction costs by the number of chunks. No device is
//! used, so nothing here depends on one.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed benchmark")]
#![expect(clippy::print_stdout, reason = "figures are printed")]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use kv_tiers::{NvmeConfig, NvmeTier, Tier, synthetic};

const CHUNKS: u64 = 1_000_000;

/// Time that this thread had a CPU: other work on the machine does not count.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn start_and_look_up() {
    let directory =
        option_env!("CARGO_TARGET_TMPDIR").map_or_else(tempfile::tempdir, tempfile::tempdir_in);
    let directory = directory.unwrap();
    synthetic::store(directory.path(), CHUNKS, 4096, 64).unwrap();
    let config = NvmeConfig::new("nvme", directory.path(), 16 << 30);
    let (began, cpu) = (Instant::now(), cpu_time());
    let tier = NvmeTier::open(config, &[], 0).unwrap();
    let (took, cpu) = (began.elapsed(), cpu_time() - cpu);
    println!("start of {CHUNKS} chunks from a snapshot: {took:?}, of it {cpu:?} on a CPU");
    let digests: Vec<_> =
        (0..CHUNKS).map(|number| synthetic::digest(number * 7919 % CHUNKS)).collect();
    let cpu = cpu_time();
    for digest in &digests {
        assert!(black_box(tier.contains(*digest)).is_some());
    }
    let per_second = CHUNKS as f64 / (cpu_time() - cpu).as_secs_f64();
    println!("look-ups: {:.1} million a second of CPU", per_second / 1e6);
}

fn memory() {
    let before = resident_bytes();
    let mut cache = synthetic::Cache::new(CHUNKS).unwrap();
    (0..CHUNKS).for_each(|number| cache.write(number));
    let bytes = resident_bytes() - before;
    println!("memory: {:.0} bytes a chunk", bytes as f64 / CHUNKS as f64);
}

fn eviction() {
    for chunks in [10_000, 100_000, 1_000_000] {
        let mut cache = synthetic::Cache::new(chunks).unwrap();
        (0..chunks).for_each(|number| cache.write(number));
        // As many again, so that every queue is as it will be; a third of them are used.
        let mut number = chunks;
        let mut churn = |count: u64| {
            for _ in 0..count {
                cache.write(number);
                if number.is_multiple_of(3) {
                    cache.read(number - chunks / 4);
                }
                number += 1;
            }
        };
        churn(chunks);
        let cpu = cpu_time();
        churn(chunks);
        let each = (cpu_time() - cpu) / u32::try_from(chunks).unwrap();
        println!("eviction and write with {chunks} chunks: {each:?}");
    }
}

fn main() {
    memory();
    start_and_look_up();
    eviction();
}
