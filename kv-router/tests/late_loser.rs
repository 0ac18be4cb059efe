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

    /// Puts the bytes where they belong if they count; returns how many are new.
    fn complete(mut self, pool: &StepPool, dest: &mut [Option<u32>]) -> u64 {
        let (chunk, first) = (self.claim.chunk, self.claim.first_block);
        let blocks = first..first + self.claim.blocks;
        self.buffer.extend(blocks.map(|block| chunk * 8 + block));
        let Delivery::First { new_bytes, .. } = pool.complete(self.claim) else { return 0 };
        for &block in &self.buffer {
            dest[block as usize] = Some(block);
        }
        new_bytes
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
    let mut dest = [None; 24];
    let mut new_bytes: u64 = winners.into_iter().map(|read| read.complete(&pool, &mut dest)).sum();
    let late_before = pool.report().tiers.iter().map(|tier| tier.late).sum::<u64>();
    let rest: Vec<_> = losers.into_iter().map(|read| read.complete(&pool, &mut dest)).collect();
    assert!(rest.contains(&0), "some lost");
    new_bytes += rest.iter().sum::<u64>();
    assert_eq!(new_bytes, 24 << 20);
    assert_eq!(dest, core::array::from_fn(|block| u32::try_from(block).ok()));
    assert!(pool.is_finished());
    assert!(pool.report().tiers.iter().map(|tier| tier.late).sum::<u64>() > late_before);
}

#[test]
fn a_read_of_which_duplicates_delivered_some_counts_for_the_rest() {
    let pool = pool(1, 8);
    let whole = pool.claim_first(FAST, Split::Never).expect("unclaimed");
    let duplicates: Vec<_> = std::iter::from_fn(|| pool.claim_duplicate(SLOW)).take(3).collect();
    for (block, duplicate) in (0..).zip(duplicates) {
        assert_eq!((duplicate.first_block, duplicate.blocks), (block, 1), "the smallest pieces");
        let new = Delivery::First { new_bytes: 1 << 20, chunk_done: false, step_done: false };
        assert_eq!(pool.complete(duplicate), new);
    }
    let rest = Delivery::First { new_bytes: 5 << 20, chunk_done: true, step_done: true };
    assert_eq!(pool.complete(whole), rest);
    let report = pool.report();
    assert_eq!((report.tiers[0].bytes, report.tiers[0].late_bytes), (5 << 20, 3 << 20));
    assert_eq!(report.delivered_bytes, 8 << 20);
}

#[test]
fn what_was_waited_for_longest_is_duplicated_first() {
    let mut config = PoolConfig::new(2);
    config.windows = [1; 8];
    config.duplicate_percent = 200;
    let spec = ChunkSpec { tiers: TierMask::all(2), blocks: 1, bytes: 1, rank: 0 };
    let pool = StepPool::new(&[spec; 3], &config).expect("a valid step");
    let firsts: Vec<_> = std::iter::from_fn(|| pool.claim_first(FAST, Split::InTail)).collect();
    assert_eq!(firsts.iter().map(|claim| claim.chunk).collect::<Vec<_>>(), [0, 1, 2]);
    // A chunk that was just duplicated comes after those whose only read is older.
    let order: Vec<_> = std::iter::from_fn(|| pool.claim_duplicate(SLOW)).collect();
    assert_eq!(order.iter().map(|claim| claim.chunk).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
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
    let done = Delivery::First { new_bytes: 1, chunk_done: true, step_done: true };
    assert_eq!(pool.complete(last), done);
}

#[test]
fn a_name_is_not_given_out_again_however_often_its_chunk_comes_back() {
    // A reader put back under a later one uses up its number, and costs no tier. The chunks that
    // nobody holds make room for many claims to be kept in mind.
    let spec = |tiers| ChunkSpec { tiers, blocks: 1, bytes: 100, rank: 0 };
    let mut specs = [spec(TierMask::EMPTY); 100];
    specs[0] = spec(TierMask::all(3));
    let mut config = PoolConfig::new(3);
    config.duplicate_percent = 100;
    let pool = StepPool::new(&specs, &config).expect("a valid step");
    let overdue = pool.claim(FAST).expect("unclaimed");
    assert_eq!(pool.expire(&overdue), Outcome::Returned);
    let mut rounds = 0;
    for _ in 0..100 {
        let claim = pool.claim_first(SLOW, Split::InTail).expect("it came back");
        let duplicate = pool.claim_duplicate(TierId(2));
        assert_eq!(pool.expire(&overdue), Outcome::Ignored, "round {rounds}");
        rounds += u32::from(duplicate.is_some());
        let _ = pool.put_back(claim);
        let _ = duplicate.map(|duplicate| pool.put_back(duplicate));
    }
    assert_eq!(rounds, 7 * 4 - 1, "the last attempt has no duplicates");
    assert_eq!(pool.complete(overdue), Delivery::Late);
    let last = pool.claim(SLOW).expect("it came back");
    let done = Delivery::First { new_bytes: 100, chunk_done: true, step_done: true };
    assert_eq!(pool.complete(last), done);
}

#[test]
fn pieces_of_another_write_are_never_combined() {
    let pool = pool(1, 8);
    let mut claims: Vec<_> = std::iter::from_fn(|| pool.claim_first(FAST, Split::InTail)).collect();
    assert_eq!(claims.len(), 8);
    let (last, other) = (claims.pop().expect("eight"), claims.pop().expect("eight"));
    for claim in claims {
        let new = Delivery::First { new_bytes: 1 << 20, chunk_done: false, step_done: false };
        assert_eq!(pool.complete(claim), new);
    }
    // One piece is of another write than those before it.
    assert_eq!(pool.reread_whole(other), Outcome::Returned);
    let whole = pool.claim(SLOW).expect("it is to be read again");
    assert_eq!((whole.first_block, whole.blocks, whole.attempt), (0, 8, 1));
    assert!(!whole.is_piece());
    assert_eq!(pool.complete(last), Delivery::Late, "it belongs to the first attempt");
    let done = Delivery::First { new_bytes: 8 << 20, chunk_done: true, step_done: true };
    assert_eq!(pool.complete(whole), done);
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
