//! A tier whose evictions are noted before they happen.

use std::{os::fd::BorrowedFd, sync::Arc};

use kv_chunk::Digest;
use kv_tiers::{
    Capabilities, Completion, EvictionGuard, Held, Located, Op, Rejected, Tier, TierStats,
};

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

impl EvictionGuard for NotingGuard<'_> {
    fn try_evict(&self, digest: Digest) -> bool {
        let given_up = self.guard.try_evict(digest);
        if given_up {
            self.ledger.note(Note::GivenUp, self.number, digest);
        }
        given_up
    }
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Noted {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        self.inner.submit(op, now_ns)
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        let guard = NotingGuard { guard, number: self.number, ledger: &self.ledger };
        self.inner.poll(now_ns, &guard, completions)
    }

    fn hold_writes(&mut self, hold: bool) {
        self.inner.hold_writes(hold);
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.inner.contains(digest)
    }

    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        self.inner.locate(digest, now_ns)
    }

    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool {
        self.inner.remove(digest, now_ns)
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        self.inner.list(visit);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn stats(&self) -> TierStats {
        self.inner.stats()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn close(&mut self) {
        self.inner.close();
    }
}
