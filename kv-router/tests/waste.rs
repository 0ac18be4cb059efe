//! How much a step reads in vain at most: every tier idle all the time, nothing completing.

use std::collections::BTreeMap;

use kv_router::{ChunkSpec, Claim, Delivery, PoolConfig, StepPool, TierId, TierMask};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn chunk(tiers: TierMask, blocks: u32) -> ChunkSpec {
    ChunkSpec { tiers, blocks, bytes: u64::from(blocks) * MIB, rank: 0 }
}

/// The tiers claim in turn until none gets anything.
fn claim_all(pool: &StepPool) -> Vec<Claim> {
    let mut claims = Vec::new();
    loop {
        let before = claims.len();
        claims.extend((0..pool.config().tiers).filter_map(|tier| pool.claim(TierId(tier))));
        if claims.len() == before {
            return claims;
        }
    }
}

/// What a step may read in vain, as the documentation has it.
fn allowed(specs: &[ChunkSpec], tiers: u8) -> u64 {
    // Two windows of 8, where a tier is slower than another.
    let few = if tiers > 1 { 16 } else { 8 };
    let held: Vec<u64> =
        specs.iter().filter(|spec| !spec.tiers.is_empty()).map(|spec| spec.bytes).collect();
    let bytes: u64 = held.iter().sum();
    match held.len() as u64 {
        0 => 0,
        1 => bytes,
        n if n <= 2 * few => bytes / 2,
        n if n < 20 * few => bytes * few / n,
        _ => bytes / 20,
    }
}

/// Runs the step with the latest reads completing first; gives the bytes that duplicates read.
fn run(specs: &[ChunkSpec], tiers: u8) -> u64 {
    let pool = StepPool::new(specs, &PoolConfig::new(tiers)).expect("a valid step");
    let claims = claim_all(&pool);
    let (mut first, mut twice) = (BTreeMap::new(), 0);
    for claim in &claims {
        let spec = specs[claim.chunk as usize];
        assert!(spec.tiers.contains(claim.tier), "{claim:?}");
        if claim.duplicate {
            twice += claim.bytes;
        } else {
            *first.entry(claim.chunk).or_insert(0) += claim.bytes;
        }
    }
    for (i, spec) in (0..).zip(specs) {
        let bytes = if spec.tiers.is_empty() { 0 } else { spec.bytes };
        assert_eq!(first.get(&i).copied().unwrap_or(0), bytes, "chunk {i}: each byte once");
    }
    let mut delivered = 0;
    for claim in claims.into_iter().rev() {
        if let Delivery::First { new_bytes, .. } = pool.complete(claim) {
            delivered += new_bytes;
        }
    }
    let report = pool.report();
    assert!(pool.is_finished());
    assert_eq!((delivered, report.duplicate_bytes()), (first.values().sum(), twice));
    assert!(
        twice <= allowed(specs, tiers),
        "{twice} of {delivered} bytes twice, of {} chunks",
        specs.len()
    );
    twice
}

#[test]
fn one_chunk_is_read_at_most_twice_and_a_few_one_and_a_half_times() {
    for tiers in [1, 2, 8] {
        for blocks in [1, 3, 4, 20] {
            let (of_64, of_230) = if tiers == 1 { (0.125, 0.05) } else { (0.25, 16.0 / 230.0) };
            for (chunks, most) in
                [(1, 1.0), (2, 0.5), (7, 0.5), (16, 0.5), (64, of_64), (230, of_230)]
            {
                let specs = vec![chunk(TierMask::all(tiers), blocks); chunks];
                let twice = run(&specs, tiers) as f64;
                let bytes = (chunks as u64 * u64::from(blocks) * MIB) as f64;
                assert!(twice > 0.0, "{chunks} chunks on {tiers} tiers: nothing against a stall");
                assert!(twice <= most * bytes, "{chunks} chunks on {tiers} tiers: {twice}");
            }
        }
    }
}

#[test]
fn what_the_slower_tiers_have_in_flight_can_be_read_again_also_if_they_try_twice_as_much() {
    let chunks = |windows: [u16; 3], fastest| {
        let mut config = PoolConfig::new(3);
        config.windows[..3].copy_from_slice(&windows);
        config.fastest = TierId(fastest);
        let specs = [chunk(TierMask::all(3), 1); 100];
        let pool = StepPool::new(&specs, &config).expect("a valid step");
        drop(claim_all(&pool));
        pool.report().duplicate_bytes() / MIB
    };
    assert_eq!(chunks([40, 15, 2], 0), 30, "two windows of the larger");
    assert_eq!(chunks([15, 2, 40], 2), 30, "of those that are not the fastest");
    assert_eq!(chunks([40, 4, 2], 0), 8, "and eight chunks in any case");
    assert_eq!(chunks([4, 40, 2], 0), 50, "but no more than half the step");
}

#[test]
fn chunks_that_nobody_holds_buy_no_duplicates() {
    let mut specs = vec![chunk(TierMask::EMPTY, 20); 100];
    specs[50] = chunk(TierMask::all(2), 20);
    assert_eq!(run(&specs, 2), 20 * MIB);
    assert_eq!(run(&specs[..50], 2), 0);
}

#[test]
fn only_the_tier_that_holds_a_chunk_reads_it_and_no_more_than_elsewhere() {
    for chunks in [1, 2, 7] {
        let specs = vec![chunk(TierMask::only(TierId(1)), 20); chunks];
        let pool = StepPool::new(&specs, &PoolConfig::new(2)).expect("a valid step");
        assert_eq!(pool.claim(TierId(0)), None);
        let _ = run(&specs, 2);
    }
}

proptest! {
    #[test]
    fn no_small_step_reads_more_in_vain_than_it_may(
        (tiers, specs) in prop_oneof![1..4_u8, Just(8)].prop_flat_map(|tiers| {
            let mask = any::<u8>().prop_map(move |bits| {
                TierMask::from_bits(bits).intersect(TierMask::all(tiers))
            });
            let spec = (mask, prop_oneof![1..4_u32, 4..24_u32], 0..MIB).prop_map(|(mask, blocks, less)| {
                ChunkSpec { bytes: u64::from(blocks) * MIB - less, ..chunk(mask, blocks) }
            });
            (Just(tiers), prop::collection::vec(spec, 0..24))
        })
    ) {
        let _ = run(&specs, tiers);
    }
}
