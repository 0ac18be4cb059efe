//! A tier whose evictions are noted before they happen.

use std::sync::Arc;

use kv_chunk::Digest;
use kv_tiers::{Completion, EvictionGuard, Tier};

use crate::ledger::{Ledger, Note};

#[derive(Debug)]
pub(crate) struct Noted {
    pub(crate) inner: Box<dyn Tier>,
    pub(crate) number: u8,
    pub(crate) ledger: Arc<Ledger>,
}

/// Notes what the engine gives up, while the tier still waits for the answer.
struct NotingGuard<'a> {
    guard: &'a dyn EvictionGuard,
    number: u8,
    ledger: &'a Ledger,
}

#[deny(clippy::missing_trait_methods)]
impl EvictionGuard for NotingGuard<'_> {
    fn try_evict(&self, digest: Digest) -> bool {
        let given_up = self.guard.try_evict(digest);
        if given_up {
            self.ledger.note(Note::GivenUp, self.number, digest);
        }
        given_up
    }

    fn may_evict(&self, digest: Digest) -> bool {
        self.guard.may_evict(digest)
    }
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Noted {
    forward_tier!(inner + submit);

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        let guard = NotingGuard { guard, number: self.number, ledger: &self.ledger };
        self.inner.poll(now_ns, &guard, completions)
    }
}
