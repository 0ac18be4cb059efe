//! Pacing: the rate is reached and not exceeded, times are exact, and nothing shows before it is due.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod common;

use std::sync::Arc;

use kv_chunk::HEADER_BYTES;
use kv_tiers::{
    Arena, Completion, Drift, Latency, MemoryConfig, MemoryTier, OpId, Stalls, ThrottleConfig,
    Throttled, Tier, record_bytes,
};

use crate::common::{arena, digest, payload, poll, read_op, settle, write_op};

const MS: u64 = 1_000_000;
const S: u64 = 1_000_000_000;
const PAYLOAD_BYTES: usize = 1 << 20;
const READ_BYTES: u64 = (HEADER_BYTES + PAYLOAD_BYTES) as u64;

/// A memory tier with chunks 0 to 3, paced from now on.
fn throttled(config: ThrottleConfig, arena: &Arc<Arena>) -> Throttled {
    let mut memory = MemoryTier::new(MemoryConfig::new("host", 64 << 20));
    for number in 0..4 {
        memory.submit(write_op(arena, number, &payload(number, PAYLOAD_BYTES)), 0).unwrap();
        poll(&mut memory, 0);
    }
    Throttled::new(Box::new(memory), config)
}

/// Reads `reads` chunks with `window` in flight; returns the completion times.
fn read_busily(tier: &mut Throttled, arena: &Arc<Arena>, window: usize, reads: usize) -> Vec<u64> {
    let (mut now_ns, mut submitted, mut times) = (0, 0, Vec::new());
    while times.len() < reads {
        while tier.in_flight() < window && submitted < reads {
            let number = submitted as u64 % 4;
            tier.submit(read_op(arena, number, 0..1), now_ns).unwrap();
            submitted += 1;
        }
        let (completions, next_ns) = poll(tier, now_ns);
        times.extend(completions.iter().map(|_| now_ns));
        if completions.is_empty() {
            assert!(next_ns.unwrap() > now_ns, "time stands still at {now_ns}");
            now_ns = next_ns.unwrap();
        }
    }
    times
}

#[track_caller]
fn assert_rate(times: &[u64], bytes_per_s: u64, tolerance: f64) {
    let bytes = READ_BYTES * times.len() as u64;
    let rate = bytes as f64 / *times.last().unwrap() as f64 * S as f64;
    let error = rate / bytes_per_s as f64 - 1.0;
    assert!(error.abs() <= tolerance, "{rate} B/s, configured {bytes_per_s}: {error:+.4}");
}

#[test]
fn a_small_window_reaches_the_rate_in_spite_of_latency() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(2 * S);
    config.latency = Latency::Fixed { ns: 400_000 };
    let times = read_busily(&mut throttled(config, &arena), &arena, 3, 1000);
    assert_rate(&times, 2 * S, 0.01);
}

#[test]
fn a_window_of_one_pays_the_latency_of_each_read() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(READ_BYTES * 1000);
    config.latency = Latency::Fixed { ns: MS };
    let times = read_busily(&mut throttled(config, &arena), &arena, 1, 100);
    assert_eq!(*times.last().unwrap(), 200 * MS);
}

#[test]
fn reads_and_writes_share_one_rate() {
    let arena = arena(8);
    let mut tier = throttled(ThrottleConfig::new(READ_BYTES * 1000), &arena);
    let mut now_ns = 0;
    for number in 0..3 {
        tier.submit(write_op(&arena, 10 + number, &payload(number, PAYLOAD_BYTES)), 0).unwrap();
        tier.submit(read_op(&arena, number, 0..1), 0).unwrap();
    }
    settle(&mut tier, &mut now_ns);
    assert_eq!(
        now_ns,
        (3 * READ_BYTES + 3 * record_bytes(PAYLOAD_BYTES as u64)) * S / (READ_BYTES * 1000)
    );
}

#[test]
fn completions_come_exactly_at_the_time_that_was_named() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(READ_BYTES * 1000);
    config.latency = Latency::Fixed { ns: 250_000 };
    let mut tier = throttled(config, &arena);
    tier.submit(read_op(&arena, 0, 0..1), 5 * MS).unwrap();
    // 1 ms of bytes, then the latency.
    assert_eq!(poll(&mut tier, 5 * MS).1, Some(6 * MS));
    assert_eq!(poll(&mut tier, 6 * MS).1, Some(6 * MS + 250_000));
    assert!(poll(&mut tier, 6 * MS + 249_999).0.is_empty());
    let (completions, next_ns) = poll(&mut tier, 6 * MS + 250_000);
    assert!(matches!(&*completions, [Completion::Read { id: OpId(0), result: Ok(_), .. }]));
    assert_eq!(next_ns, None);
}

#[test]
fn a_late_poll_does_not_slow_the_device() {
    let arena = arena(8);
    let mut tier = throttled(ThrottleConfig::new(READ_BYTES * 1000), &arena);
    for number in 0..4 {
        tier.submit(read_op(&arena, number, 0..1), 0).unwrap();
    }
    // Four reads of 1 ms: three are done at 3.5 ms, although nobody looked before.
    assert_eq!(poll(&mut tier, 3 * MS + 500_000).0.len(), 3);
    assert_eq!(poll(&mut tier, 3 * MS + 500_000).1, Some(4 * MS));
}

#[test]
fn a_write_cannot_be_seen_before_it_is_due() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(record_bytes(PAYLOAD_BYTES as u64) * 1000);
    config.latency = Latency::Fixed { ns: MS / 2 };
    let mut tier = throttled(config, &arena);
    tier.submit(write_op(&arena, 9, &payload(9, PAYLOAD_BYTES)), 0).unwrap();
    let due_ns = MS + MS / 2;
    for now_ns in [0, MS, due_ns - 1] {
        assert!(poll(&mut tier, now_ns).0.is_empty());
        assert!(tier.contains(digest(9)).is_none());
    }
    assert_eq!(poll(&mut tier, due_ns).0.len(), 1);
    assert!(tier.contains(digest(9)).is_some());
}

#[test]
fn fractions_of_a_nanosecond_are_not_lost() {
    let arena = arena(8);
    // One read takes 12.5 ns.
    let mut tier = throttled(ThrottleConfig::new(READ_BYTES * 80_000_000), &arena);
    let mut now_ns = 0;
    for number in 0..8 {
        tier.submit(read_op(&arena, number, 0..1), 0).unwrap();
    }
    settle(&mut tier, &mut now_ns);
    // Chunks 4 to 7 are not held and move nothing.
    assert_eq!(now_ns, 50);
}

#[test]
fn held_writes_give_their_share_to_reads_and_go_on_where_they_stopped() {
    let arena = arena(8);
    let mut tier =
        throttled(ThrottleConfig::new(record_bytes(PAYLOAD_BYTES as u64) * 1000), &arena);
    tier.submit(write_op(&arena, 9, &payload(9, PAYLOAD_BYTES)), 0).unwrap();
    poll(&mut tier, MS / 2);
    tier.hold_writes(true);
    tier.submit(read_op(&arena, 0, 0..1), MS / 2).unwrap();
    let (completions, _) = poll(&mut tier, MS / 2 + MS);
    assert!(matches!(&*completions, [Completion::Read { .. }]));
    assert_eq!(poll(&mut tier, 10 * MS).1, None);
    tier.hold_writes(false);
    assert_eq!(poll(&mut tier, 10 * MS).1, Some(10 * MS + MS / 2));
    assert_eq!(poll(&mut tier, 10 * MS + MS / 2).0.len(), 1);
}

#[test]
fn an_idle_device_serves_its_burst_at_once_and_then_the_rate() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(READ_BYTES * 1000);
    config.burst_bytes = 2 * READ_BYTES;
    let mut tier = throttled(config, &arena);
    for number in 0..4 {
        tier.submit(read_op(&arena, number, 0..1), S).unwrap();
    }
    assert_eq!(poll(&mut tier, S).0.len(), 2);
    assert_eq!(poll(&mut tier, S + MS).0.len(), 1);
    assert_eq!(poll(&mut tier, S + 2 * MS).0.len(), 1);
    // 1 ms of idling saved one read.
    tier.submit(read_op(&arena, 0, 0..1), S + 3 * MS).unwrap();
    tier.submit(read_op(&arena, 1, 0..1), S + 3 * MS).unwrap();
    assert_eq!(poll(&mut tier, S + 3 * MS).0.len(), 1);
}

#[test]
fn the_rate_can_be_changed_while_ops_are_in_flight() {
    let arena = arena(8);
    let mut tier = throttled(ThrottleConfig::new(READ_BYTES * 1000), &arena);
    let handle = tier.handle();
    for number in 0..3 {
        tier.submit(read_op(&arena, number, 0..1), 0).unwrap();
    }
    assert_eq!(poll(&mut tier, MS).0.len(), 1);
    handle.set_bytes_per_s(READ_BYTES * 100);
    assert_eq!(poll(&mut tier, MS).1, Some(11 * MS));
    assert_eq!(poll(&mut tier, 11 * MS).0.len(), 1);
}

#[test]
fn drift_changes_the_rate_and_keeps_its_mean() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(READ_BYTES * 1000);
    config.drift = Some(Drift { fraction: 0.5, period_ns: 250 * MS });
    let times = read_busily(&mut throttled(config, &arena), &arena, 2, 1000);
    assert_rate(&times, READ_BYTES * 1000, 0.01);
    let reads_in = |from: u64, to: u64| times.iter().filter(|t| (from..to).contains(*t)).count();
    let (fast, slow) = (reads_in(0, 125 * MS), reads_in(125 * MS, 250 * MS));
    assert!(fast > slow * 3 / 2, "{fast} in the fast half, {slow} in the slow one");
}

#[test]
fn stalls_delay_their_op_and_no_other() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(READ_BYTES * 1000);
    config.stalls = Some(Stalls { probability: 0.1, stall_ns: 50 * MS });
    config.seed = 3;
    let mut tier = throttled(config, &arena);
    let (mut now_ns, mut stalled) = (0, 0);
    for _ in 0..200 {
        let start_ns = now_ns;
        tier.submit(read_op(&arena, 0, 0..1), now_ns).unwrap();
        settle(&mut tier, &mut now_ns);
        match now_ns - start_ns {
            MS => {}
            took_ns => {
                assert_eq!(took_ns, 51 * MS);
                stalled += 1;
            }
        }
    }
    assert!((8..=35).contains(&stalled), "{stalled} of 200 at 10 %");
}

#[test]
fn lognormal_latency_has_the_configured_median_and_is_reproducible() {
    let arena = arena(8);
    let mut config = ThrottleConfig::new(u64::MAX);
    config.latency = Latency::Lognormal { median_ns: MS, sigma: 0.8 };
    let latencies = |seed: u64| -> Vec<u64> {
        let mut config = config;
        config.seed = seed;
        let mut tier = throttled(config, &arena);
        let mut now_ns = 0;
        let mut one = |_| {
            let start_ns = now_ns;
            tier.submit(read_op(&arena, 0, 0..1), now_ns).unwrap();
            settle(&mut tier, &mut now_ns);
            now_ns - start_ns
        };
        (0..400).map(&mut one).collect()
    };
    let first = latencies(1);
    assert_eq!(first, latencies(1));
    assert_ne!(first, latencies(2));
    let mut sorted = first;
    sorted.sort_unstable();
    let (median, p90) = (sorted[200], sorted[360]);
    assert!((800_000..1_250_000).contains(&median), "median {median}");
    // exp(0.8 * 1.28) = 2.8
    assert!((2_000_000..4_000_000).contains(&p90), "p90 {p90}");
}

#[test]
fn a_closed_tier_finishes_writes_that_wait_for_their_turn() {
    let arena = arena(8);
    let mut tier = throttled(ThrottleConfig::new(READ_BYTES * 1000), &arena);
    tier.submit(write_op(&arena, 9, &payload(9, PAYLOAD_BYTES)), 0).unwrap();
    tier.close();
    let completions = settle(&mut tier, &mut 0);
    assert!(matches!(&*completions, [Completion::Write { result: Ok(()), .. }]));
}
