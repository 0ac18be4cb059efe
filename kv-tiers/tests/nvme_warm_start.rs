//! A store of a million chunks starts from its snapshot, without a look at the slots.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;

use std::time::{Duration, Instant};

use kv_tiers::{NvmeConfig, NvmeTier, Tier, synthetic};
use nvme_support::{KIB, arena, on_disk};

/// Time that this thread had a CPU: other processes do not add to it.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|text| text.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

#[test]
fn a_million_chunks_start_from_the_snapshot_alone() {
    let chunks = 1_000_000;
    let directory = on_disk();
    synthetic::store(directory.path(), chunks, 4 * KIB, 64).unwrap();
    let config = NvmeConfig::new("nvme", directory.path(), 16 << 30);
    let arena = arena();
    let (before, cpu_before) = (Instant::now(), cpu_time());
    let tier = NvmeTier::open(config, &[arena], 0).unwrap();
    let cpu = cpu_time() - cpu_before;
    println!("{chunks} chunks: started in {:?}, {cpu:?} of it on a CPU", before.elapsed());
    assert_eq!(tier.detail().scanned_slots, 0, "headers were read");
    assert_eq!(tier.stats().recovered_chunks, chunks);
    for number in [0, 1, chunks / 2, chunks - 1] {
        let held = tier.contains(synthetic::digest(number)).unwrap();
        assert_eq!(held.payload_bytes, 4 * KIB);
        assert_eq!(held.write_id.get(), u128::from(number));
    }
    assert_eq!(tier.contains(synthetic::digest(chunks)), None);
}
