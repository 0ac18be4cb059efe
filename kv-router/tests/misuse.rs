//! Callers that are wrong or extreme: nothing panics, and what they spoil they can still end.

use kv_router::{
    ChunkSpec, Claim, Failure, Knee, KneeConfig, PoolConfig, Split, StepPool, TierId, TierMask,
};
use proptest::prelude::*;

const NOBODY: TierId = TierId(u8::MAX);

fn pool(specs: &[ChunkSpec], tiers: u8) -> StepPool {
    StepPool::new(specs, &PoolConfig::new(tiers)).expect("a valid step")
}

fn chunk(blocks: u32, bytes: u64, rank: u16) -> ChunkSpec {
    ChunkSpec { tiers: TierMask::all(2), blocks, bytes, rank }
}

fn answer(pool: &StepPool, claim: Claim, how: u8) {
    let _ = match how % 5 {
        0 => return complete(pool, claim),
        1 => pool.fail(claim, Failure::Io),
        2 => pool.put_back(claim),
        3 => pool.reread_whole(claim),
        _ => {
            let _ = pool.expire(&claim);
            return complete(pool, claim);
        }
    };
}

fn complete(pool: &StepPool, claim: Claim) {
    let _ = pool.complete(claim);
}

#[test]
fn sizes_that_add_up_to_more_than_a_word_are_read_like_others() {
    let most = |rank| chunk(8, u64::MAX, rank);
    for specs in [[most(0), most(0), most(0)], [most(0), most(u16::MAX), chunk(8, 3, 7)]] {
        let pool = pool(&specs, 2);
        while let Some(claim) = pool.claim(TierId(0)).or_else(|| pool.claim(TierId(1))) {
            complete(&pool, claim);
        }
        assert!(pool.is_finished());
        let report = pool.report();
        assert_eq!((report.delivered, report.all_missed()), (3, 0));
        assert_eq!(report.delivered_bytes, report.bytes);
        assert!(pool.bound_ns(&[1, 1]).is_none(), "longer than a word of nanoseconds");
    }
}

proptest! {
    #[test]
    fn claims_answered_at_another_pool_panic_nowhere_and_leave_both_to_be_cancelled(
        turns in prop::collection::vec(any::<(bool, bool, bool, u8, u8, u64)>(), 0..80),
    ) {
        // More blocks than bytes, one part, four parts, eight parts, and sizes far apart.
        let small = [chunk(9, 3, 0), chunk(1, 0, 0), chunk(4, 5, 1)];
        let large = [chunk(1, 7 << 30, 3), chunk(8, 8 << 20, 0), chunk(20, u64::MAX, 9)];
        let pools = [pool(&small, 2), pool(&large, 2)];
        let mut claims: Vec<Claim> = Vec::new();
        for (from, to, slow, how, which, bytes) in turns {
            claims.extend(pools[usize::from(from)].claim(TierId(slow.into())));
            if how & 1 == 0 && !claims.is_empty() {
                let mut claim = claims.swap_remove(usize::from(which) % claims.len());
                if how & 14 == 0 {
                    (claim.chunk, claim.bytes) = (u32::from(which % 9), bytes);
                }
                if how & 112 == 0 {
                    claim.tier = NOBODY;
                }
                answer(&pools[usize::from(to)], claim, how / 2);
            }
        }
        for pool in &pools {
            pool.cancel();
            prop_assert!(pool.is_finished());
            let report = pool.report();
            prop_assert_eq!(report.delivered + report.all_missed(), 3);
            let sums = (report.duplicate_bytes(), report.bytes);
            prop_assert!(sums.1 >= report.delivered_bytes, "{:?}", sums);
        }
    }
}

#[test]
fn a_tier_that_does_not_exist_gets_nothing_and_takes_nothing_away() {
    let pool = pool(&[chunk(8, 8 << 20, 0)], 2);
    assert_eq!(pool.claim(NOBODY), None);
    assert_eq!(pool.claim_first(TierId(2), Split::Never), None);
    assert_eq!(pool.mask_tier(NOBODY).missed, 0);
    assert_eq!(pool.mask_tier(TierId(7)).missed, 0);
    assert!(pool.claim(TierId(1)).is_some());
}

#[test]
fn a_hundred_thousand_chunks_on_eight_tiers_are_all_delivered() {
    let spec = |i: u32| {
        let bits = (i % 255 + 1).to_le_bytes()[0];
        let rank = [0, 1, 40_000, u16::MAX][(i % 4) as usize];
        ChunkSpec { tiers: TierMask::from_bits(bits), blocks: 9, bytes: 9 << 20, rank }
    };
    let pool = pool(&(0..100_000).map(spec).collect::<Vec<_>>(), 8);
    let mut idle = 0;
    for tier in (0..8).map(TierId).cycle() {
        let claim = pool.claim(tier);
        idle = if claim.is_some() { 0 } else { idle + 1 };
        claim.into_iter().for_each(|claim| complete(&pool, claim));
        if idle == 8 {
            break;
        }
    }
    assert!(pool.is_finished());
    assert_eq!(pool.report().delivered, 100_000);
}

#[test]
fn a_device_that_always_likes_the_other_window_better_is_followed_for_ever() {
    for max in [2, 32, u32::MAX] {
        let mut knee = Knee::new(KneeConfig { min: 1, max, start: 8 });
        let (mut now_ns, mut moves) = (0, 0);
        for _ in 0..60_000 {
            let base = knee.base();
            now_ns += if knee.limit() == base { 400_000 } else { 200_000 };
            knee.refilled(knee.limit(), true);
            knee.completed(1 << 20, now_ns);
            moves += u32::from(knee.base() != base);
            assert!((1..=max).contains(&knee.base()));
        }
        assert!(max > 32 || moves > 40, "{moves} moves up to {max}");
    }
}
