//! What becomes of claims: completion, failure, and withdrawal of a tier or a step.

use crate::slot::{Change, Word};
use crate::sync::Ordering;
use crate::{Claim, Delivery, Failure, MissReason, Outcome, StepPool, TierId, TierMask, Withdrawn};

impl StepPool {
    /// The read delivered verified bytes. Store them where others can find them *before* this
    /// call: whoever learns from it, or from a later call, that a chunk or the step is done also
    /// sees what was written before.
    pub fn complete(&self, claim: Claim) -> Delivery {
        let Some((slot, chunk)) = self.at(claim.chunk) else { return Delivery::Late };
        let counters = self.counters.get(claim.tier.index());
        let Ok(change) = slot.update(|word| word.complete(claim.token, chunk.parts)) else {
            counters.inspect(|counters| counters.late(&claim));
            return Delivery::Late;
        };
        let new_bytes = chunk.size_of(change.with).1;
        counters.inspect(|counters| counters.delivered(&claim, new_bytes));
        let step_done = self.account(chunk, &change);
        Delivery::First { new_bytes, chunk_done: change.new.is_delivered(), step_done }
    }

    /// The read failed: its tier is not asked for this chunk again, and what it was to read is
    /// unclaimed again unless another read of it is outstanding.
    pub fn fail(&self, claim: Claim, failure: Failure) -> Outcome {
        self.fail_read(&claim, failure)
    }

    /// The read's deadline passed, but the read itself cannot be recalled: fails it like
    /// [`fail`](Self::fail) with [`Failure::TimedOut`], and leaves the claim with the caller, who
    /// answers it when the read comes in at last. That answer will be `Late` or `Ignored`.
    pub fn expire(&self, claim: &Claim) -> Outcome {
        self.fail_read(claim, Failure::TimedOut)
    }

    /// The read was never started: undoes the claim. The tier can claim the chunk again.
    pub fn put_back(&self, claim: Claim) -> Outcome {
        let Some((slot, chunk)) = self.at(claim.chunk) else { return Outcome::Ignored };
        if claim.duplicate
            && let Some(hedge) = &self.hedge
        {
            hedge.refund(claim.bytes);
        }
        self.counters.get(claim.tier.index()).inspect(|counters| counters.put_back(&claim));
        let back = |word: Word| Some((word.put_back(claim.token, chunk.parts)?, ()));
        slot.update(back).map_or(Outcome::Ignored, |change| self.after_loss(&claim, &change))
    }

    /// The read was good, but its `write_id` differs from that of other pieces delivered before:
    /// discards them all and has the chunk read whole, by one tier. No tier is masked. Ask before
    /// completing the claim; the next attempt is numbered in [`Claim::attempt`].
    ///
    /// A read of the whole chunk has no other pieces to differ from, so there this is a failure
    /// of kind [`Failure::Corrupt`].
    pub fn reread_whole(&self, claim: Claim) -> Outcome {
        if !claim.is_piece() {
            return self.fail_read(&claim, Failure::Corrupt);
        }
        let Some((slot, chunk)) = self.at(claim.chunk) else { return Outcome::Ignored };
        let reason = MissReason::Failed(Failure::Corrupt);
        let again = |word: Word| Some((word.start_over(claim.token, chunk.parts, reason)?, ()));
        slot.update(again).map_or(Outcome::Ignored, |change| {
            self.counters.get(claim.tier.index()).inspect(|counters| counters.mixed());
            self.after_loss(&claim, &change)
        })
    }

    /// Withdraws a tier from the step: its breaker opened, or it is gone. It claims nothing more;
    /// what only it could have delivered becomes a miss; reads it has in flight still count if
    /// they deliver. Visits every chunk.
    pub fn mask_tier(&self, tier: TierId) -> Withdrawn {
        self.gone.fetch_or(TierMask::only(tier).bits(), Ordering::AcqRel);
        self.withdraw(|word, parts| word.mask(tier, parts))
    }

    /// Gives the step up: every chunk that is not resolved becomes a miss, and reads that deliver
    /// later are late. Visits every chunk.
    pub fn cancel(&self) -> Withdrawn {
        self.withdraw(|word, _| word.miss(MissReason::Cancelled))
    }

    fn fail_read(&self, claim: &Claim, failure: Failure) -> Outcome {
        let Some((slot, chunk)) = self.at(claim.chunk) else { return Outcome::Ignored };
        self.counters.get(claim.tier.index()).inspect(|counters| counters.failed(failure));
        let reason = MissReason::Failed(failure);
        let lost =
            |word: Word| Some((word.fail(claim.token, claim.tier, chunk.parts, reason)?, ()));
        slot.update(lost).map_or(Outcome::Ignored, |change| self.after_loss(claim, &change))
    }

    fn after_loss(&self, claim: &Claim, change: &Change<()>) -> Outcome {
        let Some((_, chunk)) = self.at(claim.chunk) else { return Outcome::Ignored };
        let step_done = self.account(chunk, change);
        if !change.new.is_open() {
            return Outcome::Missed { step_done };
        }
        if change.new.unclaimed(chunk.parts) & claim.token.parts() == 0 {
            return Outcome::Covered;
        }
        self.publish(claim.chunk);
        Outcome::Returned
    }

    fn withdraw(&self, step: impl Fn(Word, u8) -> Option<Word>) -> Withdrawn {
        let mut withdrawn = Withdrawn::default();
        for (slot, chunk) in self.slots.iter().zip(&self.chunks) {
            if let Ok(change) = slot.update(|word| Some((step(word, chunk.parts)?, ()))) {
                withdrawn.step_done |= self.account(chunk, &change);
                withdrawn.missed += u32::from(!change.new.is_open());
            }
        }
        withdrawn
    }
}
