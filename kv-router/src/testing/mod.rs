//! One set of operations for every checker: proptest against an oracle, real threads, shuttle with
//! random schedules, loom with all of them.

mod ledger;
#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(not(any(loom, feature = "shuttle")))]
mod oracle;
#[cfg(not(any(loom, feature = "shuttle")))]
mod sequential_tests;
#[cfg(all(test, feature = "shuttle", not(loom)))]
mod shuttle_tests;
#[cfg(not(any(loom, feature = "shuttle")))]
mod stress_tests;

use crate::slot::Token;
use crate::{
    ChunkSpec, Claim, Delivery, Failure, Outcome, PoolConfig, Split, StepPool, TierId, TierMask,
    Withdrawn,
};

/// What a caller can do to a pool. The number picks one of the claims that it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Claim(TierId, Split),
    Duplicate(TierId),
    Complete(usize),
    Fail(usize, Failure),
    Expire(usize),
    PutBack(usize),
    Reread(usize),
    /// Drops a claim without an answer.
    Drop(usize),
    Mask(TierId),
    Cancel,
}

/// What can be known of a claim once it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    pub(crate) chunk: usize,
    pub(crate) tier: TierId,
    pub(crate) first_block: u32,
    pub(crate) blocks: u32,
    pub(crate) bytes: u64,
    pub(crate) duplicate: bool,
    pub(crate) attempt: u8,
    pub(crate) piece: bool,
    token: Token,
}

impl Read {
    fn of(claim: &Claim) -> Self {
        Self {
            chunk: claim.chunk as usize,
            tier: claim.tier,
            first_block: claim.first_block,
            blocks: claim.blocks,
            bytes: claim.bytes,
            duplicate: claim.duplicate,
            attempt: claim.attempt,
            piece: claim.is_piece(),
            token: claim.token,
        }
    }
}

/// What an operation led to.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    any(loom, feature = "shuttle"),
    expect(dead_code, reason = "only the oracle looks at all of it, and it is sequential")
)]
pub(crate) enum Event {
    Claimed(TierId, Split, Option<Read>),
    Duplicated(TierId, Option<Read>),
    Completed(Read, Delivery),
    Failed(Read, Failure, Outcome),
    Expired(Read, Outcome),
    PutBack(Read, Outcome),
    Reread(Read, Outcome),
    Dropped,
    Masked(TierId, Withdrawn),
    Cancelled(Withdrawn),
}

/// One caller with the claims that it holds.
#[derive(Default)]
pub(crate) struct Actor {
    held: Vec<Claim>,
}

impl Actor {
    /// `None` if the operation needs a claim and there is none.
    pub(crate) fn apply(&mut self, pool: &StepPool, operation: Operation) -> Option<Event> {
        Some(match operation {
            Operation::Claim(tier, split) => {
                Event::Claimed(tier, split, self.hold(pool.claim_first(tier, split)))
            }
            Operation::Duplicate(tier) => {
                Event::Duplicated(tier, self.hold(pool.claim_duplicate(tier)))
            }
            Operation::Complete(n) => {
                let claim = self.take(n)?;
                Event::Completed(Read::of(&claim), pool.complete(claim))
            }
            Operation::Fail(n, failure) => {
                let claim = self.take(n)?;
                Event::Failed(Read::of(&claim), failure, pool.fail(claim, failure))
            }
            Operation::Expire(n) => {
                let n = n.checked_rem(self.held.len())?;
                Event::Expired(Read::of(&self.held[n]), pool.expire(&self.held[n]))
            }
            Operation::PutBack(n) => {
                let claim = self.take(n)?;
                Event::PutBack(Read::of(&claim), pool.put_back(claim))
            }
            Operation::Reread(n) => {
                let claim = self.take(n)?;
                Event::Reread(Read::of(&claim), pool.reread_whole(claim))
            }
            Operation::Drop(n) => {
                drop(self.take(n)?);
                Event::Dropped
            }
            Operation::Mask(tier) => Event::Masked(tier, pool.mask_tier(tier)),
            Operation::Cancel => Event::Cancelled(pool.cancel()),
        })
    }

    pub(crate) fn holds(&self) -> usize {
        self.held.len()
    }

    fn hold(&mut self, claim: Option<Claim>) -> Option<Read> {
        let claim = claim?;
        let read = Read::of(&claim);
        self.held.push(claim);
        Some(read)
    }

    fn take(&mut self, n: usize) -> Option<Claim> {
        let n = n.checked_rem(self.held.len())?;
        Some(self.held.swap_remove(n))
    }
}

/// A chunk whose bytes are a round number a block.
pub(crate) fn chunk(tiers: TierMask, blocks: u32, rank: u16) -> ChunkSpec {
    ChunkSpec { tiers, blocks, bytes: u64::from(blocks) * 1000, rank }
}

/// A configuration with the same window everywhere.
pub(crate) fn config(tiers: u8, window: u16) -> PoolConfig {
    PoolConfig { windows: [window; 8], ..PoolConfig::new(tiers) }
}

/// A small generator, so that schedules are all that a run depends on besides its seed.
#[cfg(not(loom))]
pub(crate) struct Random(pub(crate) u64);

#[cfg(not(loom))]
impl Random {
    pub(crate) fn below(&mut self, n: u64) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % n).expect("a usize has 31 bits")
    }

    /// What one tier's thread does next: mostly claims and completions, with every kind of trouble.
    pub(crate) fn operation(&mut self, tier: TierId) -> Operation {
        let n = self.below(1 << 20);
        match self.below(64) {
            0..20 => Operation::Claim(tier, Split::InTail),
            20..24 => Operation::Claim(tier, Split::Never),
            24..32 => Operation::Duplicate(tier),
            32..52 => Operation::Complete(n),
            52..56 => Operation::Fail(n, Failure::ALL[n % Failure::ALL.len()]),
            56 | 57 => Operation::Expire(n),
            58 | 59 => Operation::PutBack(n),
            60..63 => Operation::Reread(n),
            _ => Operation::Drop(n),
        }
    }

    /// A step with every kind of chunk.
    pub(crate) fn step(&mut self, tiers: u8, chunks: usize) -> Vec<ChunkSpec> {
        let all = TierMask::all(tiers);
        let mut small = |n| u8::try_from(self.below(n)).expect("n is at most 256");
        let mut draw = || {
            let some = TierMask::from_bits(small(256)).intersect(all);
            let mask = if small(3) == 0 { some } else { all };
            chunk(mask, 1 + u32::from(small(9)), u16::from(small(3)))
        };
        (0..chunks).map(|_| draw()).collect()
    }
}
