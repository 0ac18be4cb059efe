//! Which read a free slot of a tier takes next: rules 2, 3 and 5, and the splitting of rule 4.

use core::cmp::Reverse;

use crate::lane::Lane;
use crate::open_set::{End, OpenSet};
use crate::pool::Chunk;
use crate::slot::Token;
use crate::{Claim, StepPool, TierId, TierMask};

/// Whether a claim may cut a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Split {
    /// Where the configuration says so and the tail has begun.
    #[default]
    InTail,
    /// Not now: other steps wait for the slots that more and smaller reads would take. What is left
    /// of a chunk that was cut before is claimed nevertheless.
    Never,
}

impl StepPool {
    /// The next read for a free slot of `tier`: an unclaimed chunk or piece, else a duplicate.
    ///
    /// `None` when the step has nothing for this tier now. That can change until the step is
    /// finished: look again when a read of the step, of any tier, has completed or failed.
    pub fn claim(&self, tier: TierId) -> Option<Claim> {
        self.claim_first(tier, Split::InTail).or_else(|| self.claim_duplicate(tier))
    }

    /// The next unclaimed chunk or piece for `tier`.
    ///
    /// Chunks that fewer tiers hold come first, hence those that only this tier holds; among
    /// equals, those that came back or are read in pieces; then those of the rank with most
    /// unclaimed bytes; then by position, the fastest tier from the head of the step and the
    /// others from its tail.
    pub fn claim_first(&self, tier: TierId, split: Split) -> Option<Claim> {
        loop {
            if self.unclaimed() == 0 || self.gone().contains(tier) {
                return None;
            }
            if let Some(claim) = self.claim_open(self.exclusive.get(tier.index())?, tier, split) {
                return Some(claim);
            }
            let lane = self.best_lane(tier);
            if lane.is_none_or(|lane| self.holders(lane) > 1)
                && let Some(claim) = self.claim_open(self.shared.get(tier.index())?, tier, split)
            {
                return Some(claim);
            }
            let Some(chunk) = lane?.take(tier) else { continue };
            if let Some(claim) = self.take_part(chunk, tier, split) {
                return Some(claim);
            }
            // The tier was masked, or the step cancelled, while this call ran.
            self.publish(chunk);
        }
    }

    fn best_lane(&self, tier: TierId) -> Option<&Lane> {
        let usable = self.lanes.iter().filter(|lane| lane.tiers.contains(tier) && !lane.is_empty());
        usable.min_by_key(|lane| (self.holders(lane), Reverse(self.rank_bytes(lane.rank))))
    }

    fn holders(&self, lane: &Lane) -> u32 {
        lane.tiers.minus(self.gone()).len()
    }

    fn claim_open(&self, set: &OpenSet, tier: TierId, split: Split) -> Option<Claim> {
        let end = if tier == self.config.fastest { End::Head } else { End::Tail };
        loop {
            let chunk = set.peek(end)?;
            if let Some(claim) = self.take_part(chunk, tier, split) {
                return Some(claim);
            }
            // Nothing to claim here, as far as the last look went: take it off the set, then look
            // again, for it can have been returned in between and found still listed.
            set.remove(chunk);
            if let Some(claim) = self.take_part(chunk, tier, split) {
                self.publish(chunk);
                return Some(claim);
            }
        }
    }

    /// Claims the chunk, or its next piece, if the tier may and something of it is unclaimed.
    fn take_part(&self, index: u32, tier: TierId, split: Split) -> Option<Claim> {
        let (slot, chunk) = self.at(index)?;
        let most = if split == Split::InTail { self.parts_at_once(chunk) } else { chunk.parts };
        let change = slot.update(|word| word.claim(tier, chunk.parts, most)).ok()?;
        self.account(chunk, &change);
        if change.new.unclaimed(chunk.parts) != 0 {
            self.publish(index);
        }
        if let Some(hedge) = &self.hedge {
            hedge.record(index, change.with);
        }
        Some(chunk.claim(index, tier, change.with))
    }

    /// How many parts of the chunk a claim takes. The less is unclaimed for each place of a window,
    /// the smaller the pieces: reads that end the step are short, and few are.
    fn parts_at_once(&self, chunk: &Chunk) -> u8 {
        // Nobody shares what one tier holds. Where it has other reads besides, smaller ones would only be more.
        if chunk.parts == 1 || (chunk.tiers.len() == 1 && !self.is_small()) {
            return chunk.parts;
        }
        let one_each = u64::from(chunk.blocks) * u64::from(chunk.places);
        let unclaimed = u64::from(self.waiting.get().1);
        let limits = if self.is_small() { SMALL_STEP } else { LARGE_STEP };
        let halvings = limits.iter().take_while(|&&limit| unclaimed * UNIT < one_each * limit);
        (chunk.parts >> halvings.count()).max(1)
    }

    /// Whether the step has no more than two chunks for each place.
    fn is_small(&self) -> bool {
        self.len() as u64 <= self.config.places() * 2
    }

    /// Lists a chunk that left its lane for the tiers that can read what is unclaimed of it. Comes
    /// after the transition that made it claimable.
    pub(crate) fn publish(&self, index: u32) {
        let Some((slot, chunk)) = self.at(index) else { return };
        let word = slot.load();
        if word.unclaimed(chunk.parts) == 0 {
            return;
        }
        let tiers: TierMask = word.alive();
        let sets = if tiers.len() == 1 { &self.exclusive } else { &self.shared };
        for set in tiers.iter().filter_map(|tier| sets.get(tier.index())) {
            set.insert(index);
        }
    }
}

/// Unclaimed chunks for each place below which pieces are halves, quarters and eighths, in units of
/// `1 / UNIT`: 1, 1/4 and 1/16. Each halving makes more reads, and each read can stall.
const LARGE_STEP: [u64; 3] = [80, 20, 5];
/// The same for small steps, all of which are tail: 5/4, 1/2 and 1/5.
const SMALL_STEP: [u64; 3] = [100, 40, 16];
const UNIT: u64 = 80;

impl Chunk {
    pub(crate) fn claim(&self, index: u32, tier: TierId, token: Token) -> Claim {
        let range = self.range(token.first, token.count);
        Claim {
            chunk: index,
            tier,
            first_block: range.0,
            blocks: range.1,
            bytes: self.bytes_of(range),
            duplicate: token.reader != 0,
            attempt: token.attempt(),
            piece: token.count != self.parts,
            token,
        }
    }
}
