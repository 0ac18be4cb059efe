//! Random operations of one caller, each answer compared with the oracle's.

use proptest::prelude::*;

use super::oracle::Oracle;
use super::{Actor, Event, Operation, chunk};
use crate::{ChunkSpec, Failure, PoolConfig, Split, StepPool, Tail, TierId, TierMask};

fn specs(tiers: u8) -> impl Strategy<Value = Vec<ChunkSpec>> {
    let all = TierMask::all(tiers);
    let mask = prop_oneof![
        3 => Just(all),
        2 => any::<u8>().prop_map(move |bits| TierMask::from_bits(bits).intersect(all)),
    ];
    let spec =
        (mask, 1..10_u32, 0..3_u16).prop_map(|(mask, blocks, rank)| chunk(mask, blocks, rank));
    prop::collection::vec(spec, 0..14)
}

fn configs(tiers: u8) -> impl Strategy<Value = PoolConfig> {
    let tail = prop_oneof![
        1 => Just(Tail::Whole),
        1 => Just(Tail::Duplicate),
        3 => Just(Tail::SplitAndDuplicate)
    ];
    (0..tiers.max(1), prop::array::uniform8(0..3_u16), tail, 0..60_u8, (0..9_u32, 0..5_u8))
        .prop_map(
            move |(
                fastest,
                windows,
                tail,
                duplicate_percent,
                (duplicate_chunks, duplicate_windows),
            )| PoolConfig {
                fastest: TierId(fastest),
                windows,
                tail,
                duplicate_percent,
                duplicate_chunks,
                duplicate_windows,
                ..PoolConfig::new(tiers)
            },
        )
}

fn operations(tiers: u8) -> impl Strategy<Value = Vec<Operation>> {
    let tier = move || (0..tiers.max(1)).prop_map(TierId);
    let n = || 0..64_usize;
    let operation = prop_oneof![
        12 => tier().prop_map(|tier| Operation::Claim(tier, Split::InTail)),
        2 => tier().prop_map(|tier| Operation::Claim(tier, Split::Never)),
        8 => tier().prop_map(Operation::Duplicate),
        9 => n().prop_map(Operation::Complete),
        3 => (n(), prop::sample::select(&Failure::ALL)).prop_map(|(n, f)| Operation::Fail(n, f)),
        2 => n().prop_map(Operation::Expire),
        2 => n().prop_map(Operation::PutBack),
        1 => n().prop_map(Operation::Reread),
        1 => n().prop_map(Operation::Drop),
    ];
    let rare = prop_oneof![
        40 => operation,
        1 => tier().prop_map(Operation::Mask),
    ];
    prop::collection::vec(rare, 0..160)
}

fn runs() -> impl Strategy<Value = (Vec<ChunkSpec>, PoolConfig, Vec<Operation>, bool)> {
    prop_oneof![0..4_u8, Just(8)].prop_flat_map(|tiers| {
        (specs(tiers), configs(tiers), operations(tiers), prop::bool::weighted(0.1))
    })
}

/// Answers everything that is held and claims everything that is left; the oracle, which has seen
/// it all, says whether the step may be unfinished then.
fn drain(pool: &StepPool, oracle: &mut Oracle, actor: &mut Actor, dropped: bool) {
    for tier in (0..pool.config().tiers).map(TierId).cycle().take(10_000) {
        while let Some(event) = actor.apply(pool, Operation::Complete(0)) {
            oracle.check(pool, event);
        }
        if pool.unclaimed() == 0 {
            break;
        }
        let event = actor.apply(pool, Operation::Claim(tier, Split::InTail));
        oracle.check(pool, event.expect("a claim needs no claim"));
    }
    if dropped {
        let event = actor.apply(pool, Operation::Cancel);
        oracle.check(pool, event.expect("cancelling needs no claim"));
    }
    assert!(pool.is_finished(), "{pool:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_is_the_oracles((specs, config, operations, cancel) in runs()) {
        let pool = StepPool::new(&specs, &config).expect("a valid step");
        let mut oracle = Oracle::new(&specs, &config);
        let (mut actor, mut dropped) = (Actor::default(), false);
        for operation in operations {
            if let Some(event) = actor.apply(&pool, operation) {
                dropped |= matches!(event, Event::Dropped);
                oracle.check(&pool, event);
            }
        }
        if cancel {
            let event = actor.apply(&pool, Operation::Cancel).expect("cancelling needs no claim");
            oracle.check(&pool, event);
        }
        drain(&pool, &mut oracle, &mut actor, dropped);
        let report = pool.report();
        prop_assert_eq!(report.delivered + report.all_missed(), specs.len() as u64);
    }
}
