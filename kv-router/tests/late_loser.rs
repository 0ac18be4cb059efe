//! Reads that come in after their bytes have ceased to matter, into slots that have moved on.

use kv_router::{
    ChunkSpec, Claim, Delivery, Failure, Outcome, PoolConfig, Split, StepPool, TierId, TierMask,
};

const FAST: TierId = TierId(0);
const SLOW: TierId = TierId(1);

fn pool(chunks: usize, blocks: u32) -> StepPool {
    let bytes = u64::from(blocks) << 20;
    let spec = ChunkSpec { tiers: TierMask::all(2), blocks, bytes, rank: 0 };
    StepPool::new(&vec![spec; chunks], &PoolConfig::new(2)).expect("a valid step")
}

/// A device that fills its buffer only when it completes. The buffer belongs to the read until
/// then, whatever becomes of the claim.
struct InFlight {
    claim: Claim,
    buffer: Vec<u32>,
}

impl InFlight {
    fn start(claim: Claim) -> Self {
        Self { claim, buffer: Vec::new() }
    }

    /// Returns the bytes if they count.
    fn complete(mut self, pool: &StepPool) -> Option<(u32, u32, Vec<u32>)> {
        let (chunk, first) = (self.claim.chunk, self.claim.first_block);
        self.buffer.extend((first..first + self.claim.blocks).map(|block| chunk * 100 + block));
        match pool.complete(self.claim) {
            Delivery::First { .. } => Some((chunk, first, self.buffer)),
            Delivery::Late => None,
        }
    }
}

#[test]
fn losers_that_complete_after_the_step_change_nothing() {
    let pool = pool(3, 8);
    let mut reads: Vec<InFlight> = Vec::new();
    while let Some(claim) = pool.claim(FAST).or_else(|| pool.claim(SLOW)) {
        reads.push(InFlight::start(claim));
    }
    let (losers, winners): (Vec<_>, Vec<_>) =
        reads.into_iter().partition(|read| !read.claim.duplicate);
    assert!(!losers.is_empty() && !winners.is_empty());

    // Each block is delivered once, mostly by duplicates; the first readers come last.
    let mut delivered: Vec<_> =
        winners.into_iter().filter_map(|read| read.complete(&pool)).collect();
    let late_before = pool.report().tiers.iter().map(|tier| tier.late).sum::<u64>();
    let rest: Vec<_> = losers.into_iter().map(|read| read.complete(&pool)).collect();
    assert!(rest.iter().any(Option::is_none), "some lost");
    delivered.extend(rest.into_iter().flatten());
    delivered.sort();
    let bytes: Vec<u32> = delivered.into_iter().flat_map(|(_, _, bytes)| bytes).collect();
    let expected: Vec<u32> = (0..3).flat_map(|c| (0..8).map(move |b| c * 100 + b)).collect();
    assert_eq!(bytes, expected);
    assert!(pool.is_finished());
    assert!(pool.report().tiers.iter().map(|tier| tier.late).sum::<u64>() > late_before);
}

#[test]
fn an_expired_read_is_late_even_after_its_chunk_was_claimed_again_by_the_same_name() {
    // The same chunk is claimed and expired by tier after tier; the first claim must never be
    // taken for a later one.
    let spec = ChunkSpec { tiers: TierMask::all(8), blocks: 1, bytes: 1, rank: 0 };
    let pool = StepPool::new(&[spec], &PoolConfig::new(8)).expect("a valid step");
    let mut expired = Vec::new();
    for tier in (0..7).map(TierId) {
        let claim = pool.claim_first(tier, Split::Never).expect("it came back");
        assert_eq!(pool.expire(&claim), Outcome::Returned);
        assert_eq!(pool.expire(&claim), Outcome::Ignored, "once is enough");
        expired.push(claim);
    }
    let last = pool.claim_first(TierId(7), Split::Never).expect("it came back");
    for claim in expired {
        assert_eq!(pool.complete(claim), Delivery::Late);
    }
    assert_eq!(pool.complete(last), Delivery::First { chunk_done: true, step_done: true });
}

#[test]
fn pieces_of_another_write_are_never_combined() {
    let pool = pool(1, 8);
    let mut claims: Vec<_> = std::iter::from_fn(|| pool.claim_first(FAST, Split::InTail)).collect();
    assert_eq!(claims.len(), 4);
    let (last, third) = (claims.pop().expect("four"), claims.pop().expect("four"));
    for claim in claims {
        assert_eq!(pool.complete(claim), Delivery::First { chunk_done: false, step_done: false });
    }
    // The third piece is of another write than the first two.
    assert_eq!(pool.reread_whole(third), Outcome::Returned);
    let whole = pool.claim(SLOW).expect("it is to be read again");
    assert_eq!((whole.first_block, whole.blocks, whole.attempt), (0, 8, 1));
    assert!(!whole.is_piece());
    assert_eq!(pool.complete(last), Delivery::Late, "it belongs to the first attempt");
    assert_eq!(pool.complete(whole), Delivery::First { chunk_done: true, step_done: true });
}

#[test]
fn answers_after_cancel_are_late() {
    let pool = pool(2, 1);
    let (a, b) = (pool.claim(FAST).expect("unclaimed"), pool.claim(SLOW).expect("unclaimed"));
    let withdrawn = pool.cancel();
    assert_eq!((withdrawn.missed, withdrawn.step_done), (2, true));
    assert_eq!(pool.complete(a), Delivery::Late);
    assert_eq!(pool.fail(b, Failure::Io), Outcome::Ignored);
    assert_eq!(pool.claim(FAST), None);
    assert_eq!(pool.cancel().missed, 0);
}
