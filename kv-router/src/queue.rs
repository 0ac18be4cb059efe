//! The steps that one tier works on, in order of arrival.

use std::collections::VecDeque;

use crate::{Claim, Split, StepPool, TierId};

/// Whether a free slot may be filled with a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// Yes.
    Allowed,
    /// No: the tier has a write in flight.
    Forbidden,
}

/// One tier's view of the steps in progress; `T` is the caller's handle on a step, such as an
/// `Arc`. Owned by the tier's thread; each tier has its own queue over the same steps.
///
/// A free slot takes, in this order: what is unclaimed of the oldest step, of later steps, then a
/// duplicate, oldest step first. Chunks are split only when no later step waits.
#[derive(Debug)]
pub struct TierQueue<T> {
    tier: TierId,
    limit: usize,
    steps: VecDeque<T>,
}

impl<T: AsRef<StepPool>> TierQueue<T> {
    /// An empty queue that takes at most `limit` unfinished steps.
    #[must_use]
    pub fn new(tier: TierId, limit: usize) -> Self {
        Self { tier, limit, steps: VecDeque::with_capacity(limit.min(1024)) }
    }

    /// Adds a step behind all others. Finished steps are dropped.
    ///
    /// # Errors
    ///
    /// The step itself, if the queue is full.
    pub fn push(&mut self, step: T) -> Result<(), T> {
        self.drop_finished();
        if self.steps.len() >= self.limit {
            return Err(step);
        }
        self.steps.push_back(step);
        Ok(())
    }

    /// The next read for a free slot of this tier, with the step that it belongs to.
    pub fn claim(&mut self, duplicates: Duplicates) -> Option<(&T, Claim)> {
        self.drop_finished();
        let (at, claim) = self
            .first_read()
            .or_else(|| (duplicates == Duplicates::Allowed).then(|| self.duplicate()).flatten())?;
        Some((self.steps.get(at)?, claim))
    }

    /// Whether no step is in progress.
    pub fn is_idle(&mut self) -> bool {
        self.drop_finished();
        self.steps.is_empty()
    }

    /// The unfinished steps, oldest first.
    pub fn steps(&self) -> impl Iterator<Item = &T> {
        self.steps.iter().filter(|step| !step.as_ref().is_finished())
    }

    fn first_read(&self) -> Option<(usize, Claim)> {
        let last_waiting = self.steps.iter().rposition(|step| step.as_ref().unclaimed() != 0)?;
        self.steps.iter().enumerate().take(last_waiting + 1).find_map(|(at, step)| {
            let split = if at < last_waiting { Split::Never } else { Split::InTail };
            Some((at, step.as_ref().claim_first(self.tier, split)?))
        })
    }

    fn duplicate(&self) -> Option<(usize, Claim)> {
        self.steps
            .iter()
            .enumerate()
            .find_map(|(at, step)| Some((at, step.as_ref().claim_duplicate(self.tier)?)))
    }

    fn drop_finished(&mut self) {
        self.steps.retain(|step| !step.as_ref().is_finished());
    }
}
