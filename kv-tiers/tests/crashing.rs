//! Crashes: at every grain, of the process and of the power, nothing that is found is wrong.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod common;

use std::{collections::BTreeSet, sync::Arc};

use kv_tiers::{Arena, Crash, CrashImage, Crashing, FlushPolicy, MemoryConfig, Tier, record_bytes};

use crate::common::{arena, digest, payload, read, verify, write};

const PAYLOAD_BYTES: usize = 20_000;
const CHUNKS: u64 = 6;

fn open(image: &CrashImage, flush: FlushPolicy) -> Crashing {
    // Room for four: the last writes evict and reuse places.
    let mut config = MemoryConfig::new("host", 4 * record_bytes(PAYLOAD_BYTES as u64));
    config.payload_bytes_max = PAYLOAD_BYTES as u64;
    Crashing::open(image.clone(), config, flush)
}

/// Writes chunks until the medium stops; returns those that are readable: completed, and not evicted since.
fn run(image: &CrashImage, flush: FlushPolicy, arena: &Arc<Arena>) -> BTreeSet<u64> {
    let mut tier = open(image, flush);
    let mut published = BTreeSet::new();
    for number in 0..CHUNKS {
        let written = write(&mut tier, arena, number, &payload(number, PAYLOAD_BYTES)).is_ok();
        // An eviction that the medium did not take part in any more is undone by the crash.
        published.retain(|&number| image.is_dead() || tier.contains(digest(number)).is_some());
        if written {
            published.insert(number);
        }
        if number == 2 && !image.is_dead() {
            tier.remove(digest(1), 0);
            published.remove(&1);
        }
    }
    published
}

/// Everything that a reopened tier shows is right; returns what it shows.
fn found(image: &CrashImage, flush: FlushPolicy, arena: &Arc<Arena>) -> BTreeSet<u64> {
    let mut tier = open(image, flush);
    let shown: BTreeSet<u64> =
        (0..CHUNKS).filter(|&it| tier.contains(digest(it)).is_some()).collect();
    assert_eq!(tier.stats().chunks, shown.len() as u64);
    assert!(tier.stats().used_bytes <= tier.stats().capacity_bytes);
    for &number in &shown {
        let piece = verify(read(&mut tier, arena, number).unwrap(), number).unwrap();
        assert!(piece.bytes() == payload(number, PAYLOAD_BYTES), "chunk {number}");
    }
    shown
}

fn grains_of_a_whole_run(flush: FlushPolicy, arena: &Arc<Arena>) -> u64 {
    let image = CrashImage::new(4096);
    run(&image, flush, arena);
    image.grains_written()
}

#[test]
fn a_write_that_completed_survives_the_process_wherever_it_dies() {
    let arena = arena(2);
    for flush in [FlushPolicy::Always, FlushPolicy::Never] {
        for stop in 0..=grains_of_a_whole_run(flush, &arena) {
            let image = CrashImage::new(4096);
            image.stop_after_grains(stop);
            let published = run(&image, flush, &arena);
            let found = found(&image.crash(Crash::Process), flush, &arena);
            let missing: Vec<_> = published.difference(&found).collect();
            // The victim of the write that the crash interrupted may be gone already.
            assert!(missing.len() <= usize::from(image.is_dead()), "stop {stop}: {missing:?}");
        }
    }
}

#[test]
fn a_flushed_write_survives_the_loss_of_power_wherever_it_strikes() {
    let arena = arena(2);
    for stop in 0..=grains_of_a_whole_run(FlushPolicy::Always, &arena) {
        for seed in 0..4 {
            let image = CrashImage::new(4096);
            image.stop_after_grains(stop);
            let published = run(&image, FlushPolicy::Always, &arena);
            let crashed = image.crash(Crash::Power { seed });
            let found = found(&crashed, FlushPolicy::Always, &arena);
            let missing: Vec<_> = published.difference(&found).collect();
            assert!(missing.len() <= usize::from(image.is_dead()), "stop {stop}: {missing:?}");
            assert!(image.violations().is_empty());
        }
    }
}

#[test]
fn unflushed_writes_are_torn_and_unordered_but_never_wrong() {
    let arena = arena(2);
    let mut survivors = BTreeSet::new();
    for seed in 0..400 {
        let image = CrashImage::new(4096);
        run(&image, FlushPolicy::Never, &arena);
        let shown = found(&image.crash(Crash::Power { seed }), FlushPolicy::Never, &arena);
        survivors.insert(shown.len());
    }
    // Six grains each survive by the toss of a coin: mostly none, sometimes one.
    assert!(survivors.contains(&0) && survivors.len() > 1, "{survivors:?}");
}

#[test]
fn the_old_medium_and_the_crashed_one_are_apart() {
    let image = CrashImage::new(64);
    image.write(10, b"before").unwrap();
    let crashed = image.crash(Crash::Process);
    image.write(10, b"after!").unwrap();
    let mut bytes = [0; 6];
    crashed.read(10, &mut bytes);
    assert_eq!(&bytes, b"before");
}

#[test]
fn power_loss_mixes_grains_but_never_tears_one() {
    let image = CrashImage::new(64);
    image.write(0, &[1; 256]).unwrap();
    image.flush().unwrap();
    image.write(0, &[2; 256]).unwrap();
    image.write(0, &[3; 256]).unwrap();
    image.flush_range(64..128).unwrap();
    let mut seen = BTreeSet::new();
    for seed in 0..100 {
        let mut bytes = [0; 256];
        image.crash(Crash::Power { seed }).read(0, &mut bytes);
        let grains: Vec<u8> = bytes.chunks(64).map(|grain| grain[0]).collect();
        assert!(bytes.chunks(64).all(|grain| grain.iter().all(|byte| *byte == grain[0])));
        assert_eq!(grains[1], 3, "flushed");
        seen.insert(grains);
    }
    assert!(seen.len() > 10, "{seen:?}");
}

#[test]
fn relying_on_what_is_not_durable_is_a_violation() {
    let image = CrashImage::new(64);
    image.write(128, &[1; 100]).unwrap();
    image.rely_on(0..128);
    assert!(image.violations().is_empty());
    image.rely_on(100..300);
    assert_eq!(image.violations()[0].offset, 128);
    image.flush_range(128..129).unwrap();
    image.rely_on(128..200);
    assert_eq!(image.violations()[1].offset, 192);
    image.flush().unwrap();
    image.rely_on(0..u64::MAX);
    assert_eq!(image.violations().len(), 2);
}
