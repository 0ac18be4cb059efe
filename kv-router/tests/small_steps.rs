//! Steps at the edge: nothing to read, nobody to read it, one of each.

use kv_router::{
    ChunkSpec, ChunkStatus, Claim, Delivery, Failure, MissReason, Outcome, PoolConfig, Split,
    StepPool, Tail, TierId, TierMask,
};

const FAST: TierId = TierId(0);
const SLOW: TierId = TierId(1);
const MIB: u64 = 1 << 20;

fn chunk(tiers: TierMask, blocks: u32) -> ChunkSpec {
    ChunkSpec { tiers, blocks, bytes: u64::from(blocks) * MIB, rank: 0 }
}

fn pool(specs: &[ChunkSpec], tiers: u8) -> StepPool {
    StepPool::new(specs, &PoolConfig::new(tiers)).expect("a valid step")
}

fn all_claims(pool: &StepPool, tier: TierId) -> Vec<Claim> {
    std::iter::from_fn(|| pool.claim(tier)).collect()
}

/// Completes every claim and returns how often the step was reported done.
fn complete_all(pool: &StepPool, claims: Vec<Claim>) -> usize {
    let done = |claim| match pool.complete(claim) {
        Delivery::First { step_done, .. } => usize::from(step_done),
        Delivery::Late => 0,
    };
    claims.into_iter().map(done).sum()
}

#[test]
fn a_step_without_chunks_is_finished() {
    let pool = pool(&[], 2);
    assert!(pool.is_finished() && pool.is_empty());
    assert_eq!(pool.claim(FAST), None);
    assert_eq!(pool.cancel().missed, 0);
    assert_eq!(pool.status(0), None);
}

#[test]
fn without_tiers_every_chunk_is_a_miss_at_once() {
    let pool = pool(&[chunk(TierMask::EMPTY, 20); 7], 0);
    assert!(pool.is_finished());
    assert_eq!(pool.claim(FAST), None);
    assert_eq!(pool.status(6), Some(ChunkStatus::Missed(MissReason::NoReplica)));
    assert_eq!(pool.report().missed(MissReason::NoReplica), 7);
}

#[test]
fn small_steps_on_one_tier_finish_without_reading_too_much() {
    for chunks in [1_usize, 2, 7] {
        for blocks in [1, 3, 4, 20] {
            let pool = pool(&vec![chunk(TierMask::all(1), blocks); chunks], 1);
            let claims = all_claims(&pool, FAST);
            let first: u64 = claims.iter().filter(|c| !c.duplicate).map(|c| c.bytes).sum();
            let twice: u64 = claims.iter().filter(|c| c.duplicate).map(|c| c.bytes).sum();
            assert_eq!(first, chunks as u64 * u64::from(blocks) * MIB, "each byte once");
            assert!(twice <= (first / 2).max(u64::from(blocks) * MIB), "{twice} bytes twice");
            assert_eq!(complete_all(&pool, claims), 1);
            let report = pool.report();
            assert_eq!((report.delivered, report.delivered_bytes), (chunks as u64, first));
        }
    }
}

#[test]
fn without_duplicates_nothing_is_read_twice() {
    let mut config = PoolConfig::new(2);
    config.tail = Tail::Whole;
    let pool = StepPool::new(&[chunk(TierMask::all(2), 20); 7], &config).expect("a valid step");
    let (fast, slow) = (pool.claim(FAST), all_claims(&pool, SLOW));
    assert_eq!(slow.len(), 6);
    assert!(slow.iter().all(|claim| claim.blocks == 20 && !claim.duplicate));
    assert_eq!(complete_all(&pool, fast.into_iter().chain(slow).collect()), 1);
}

#[test]
fn chunks_that_only_the_slow_tier_holds_are_left_to_it() {
    let pool = pool(&[chunk(TierMask::only(SLOW), 2); 7], 2);
    assert_eq!(pool.claim(FAST), None);
    let claims = all_claims(&pool, SLOW);
    let order: Vec<u32> = claims.iter().map(|claim| claim.chunk).take(7).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5, 6], "the prefix first");
    assert_eq!(pool.claim(FAST), None, "it has nothing to duplicate from");
    assert_eq!(complete_all(&pool, claims), 1);
}

#[test]
fn a_rank_with_nothing_does_not_matter() {
    let of = |rank| ChunkSpec { rank, ..chunk(TierMask::all(1), 1) };
    let nothing = ChunkSpec { tiers: TierMask::EMPTY, ..of(1) };
    let pool = pool(&[of(0), nothing, of(7), of(7)], 1);
    let claims = all_claims(&pool, FAST);
    assert_eq!(claims.first().map(|claim| claim.chunk), Some(2), "rank 7 has most bytes left");
    assert_eq!(complete_all(&pool, claims), 1);
    assert_eq!(pool.report().missed(MissReason::NoReplica), 1);
}

#[test]
fn pieces_are_whole_blocks_and_make_up_the_chunk() {
    for (blocks, pieces) in [(3, 1), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8), (20, 8), (21, 8)] {
        let spec =
            ChunkSpec { bytes: u64::from(blocks) * MIB - 1, ..chunk(TierMask::all(1), blocks) };
        let pool = pool(&[spec], 1);
        let claims: Vec<_> = std::iter::from_fn(|| pool.claim_first(FAST, Split::InTail)).collect();
        assert_eq!(claims.len(), pieces, "{blocks} blocks");
        let mut next = 0;
        for claim in &claims {
            assert_eq!(claim.first_block, next);
            next += claim.blocks;
        }
        assert_eq!(next, blocks);
        assert_eq!(claims.iter().map(|claim| claim.bytes).sum::<u64>(), spec.bytes);
    }
}

#[test]
fn the_last_tier_to_fail_makes_the_miss_and_ends_the_step() {
    let pool = pool(&[chunk(TierMask::all(2), 1)], 2);
    let claim = pool.claim(FAST).expect("unclaimed");
    assert_eq!(pool.fail(claim, Failure::Io), Outcome::Returned);
    assert_eq!(pool.claim(FAST), None, "the tier is masked for the chunk");
    let claim = pool.claim(SLOW).expect("it came back");
    assert_eq!(pool.fail(claim, Failure::Corrupt), Outcome::Missed { step_done: true });
    let reason = MissReason::Failed(Failure::Corrupt);
    assert_eq!(pool.status(0), Some(ChunkStatus::Missed(reason)));
    let report = pool.report();
    assert_eq!(report.missed(reason), 1);
    assert_eq!(report.tiers[0].failures(Failure::Io), 1);
}

#[test]
fn masking_the_only_tier_ends_the_step() {
    let pool = pool(&[chunk(TierMask::only(FAST), 1), chunk(TierMask::only(SLOW), 1)], 2);
    let withdrawn = pool.mask_tier(SLOW);
    assert_eq!((withdrawn.missed, withdrawn.step_done), (1, false));
    let claim = pool.claim(FAST).expect("the other tier goes on");
    assert_eq!(pool.mask_tier(FAST).missed, 0, "its read is in flight");
    let last = Delivery::First { new_bytes: MIB, chunk_done: true, step_done: true };
    assert_eq!(pool.complete(claim), last);
}

#[test]
fn steps_that_make_no_sense_are_refused_with_the_field() {
    let refused = |specs: &[ChunkSpec], config: &PoolConfig| {
        StepPool::new(specs, config).expect_err("it makes no sense").to_string()
    };
    let config = PoolConfig::new(2);
    let stray = chunk(TierMask::only(TierId(2)), 1);
    assert!(refused(&[stray], &config).contains("chunk 0 lists tier 2"));
    assert!(refused(&[chunk(TierMask::all(2), 0)], &config).contains("0 blocks"));
    assert!(refused(&[], &PoolConfig::new(9)).contains("config.tiers is 9"));
    let mut config = PoolConfig::new(2);
    config.fastest = TierId(2);
    assert!(refused(&[], &config).contains("config.fastest is tier 2"));
}
