//! Every driver and wrapper keeps the contract of a tier.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "rules that are skipped are shown")]

use std::sync::Arc;

use kv_tiers::{
    Arena, ArenaConfig, MemoryConfig, MemoryTier, Tier, TierError,
    conformance::{self, Clock, Harness, Open, OpenTier},
};

const CAPACITY_BYTES: u64 = 24 << 20;
/// Below a slot's room, so that a payload too large can be made.
const PAYLOAD_BYTES_MAX: u64 = (2 << 20) + 5;

fn arena() -> Arc<Arena> {
    Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap()
}

fn memory() -> MemoryTier {
    let mut config = MemoryConfig::new("host", CAPACITY_BYTES);
    config.payload_bytes_max = PAYLOAD_BYTES_MAX;
    config.queue_ops_max = 6;
    MemoryTier::new(config)
}

fn check(open: &mut OpenTier<'_>, clock: &mut Clock<'_>, skipped: &[&str]) {
    let report = conformance::run(&mut Harness::new(open, arena(), clock))
        .unwrap_or_else(|broken| panic!("{broken}"));
    println!("{report}");
    let names: Vec<&str> = report.skipped.iter().map(|(rule, _)| *rule).collect();
    assert_eq!(names, skipped);
}

const VOLATILE: [&str; 3] =
    ["wake_fd_wakes", "a_restart_finds_every_chunk", "what_a_restart_found_counts_and_leaves"];

fn check_virtual(mut make: impl FnMut(Open) -> Result<Box<dyn Tier>, TierError>, skipped: &[&str]) {
    check(&mut make, &mut conformance::virtual_clock(), skipped);
}

#[test]
fn memory_keeps_the_contract() {
    check_virtual(|_| Ok(Box::new(memory())), &VOLATILE);
}
