//! The concurrent state: [`Pending`] behind one lock, and the gate. Generic in the payload, so that loom can model it.
//!
//! The lock is held for map and queue operations only; no byte of a chunk is copied and no device is touched under it.

use std::sync::PoisonError;

use kv_chunk::{Digest, WriteId};

use crate::{
    Gate, Refused, Staged, WritebackConfig,
    queue::Pending,
    sync::{Mutex, MutexGuard},
};

#[derive(Debug)]
pub(crate) struct Shared<R> {
    pending: Mutex<Pending<R>>,
    pub(crate) gate: Gate,
}

/// What a tier should write now.
#[derive(Clone, Debug)]
pub enum Next<R> {
    /// This chunk; [`finish`](crate::Writeback::finish) must follow, or [`requeue`](crate::Writeback::requeue).
    Write(R),
    /// Something waits, the gate is closed. Ask again at `until_ns`, when the gate opens in any case, and after a
    /// read finished, a forward pass began or a flush began.
    Wait {
        /// When the gate opens at the latest.
        until_ns: u64,
    },
    /// Nothing waits. Ask again after something was staged.
    Idle,
}

impl<R: Clone> Shared<R> {
    pub(crate) fn new(config: &WritebackConfig) -> Self {
        Self { pending: Mutex::new(Pending::new(config)), gate: Gate::new(config.max_age_ns) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Pending<R>> {
        // No operation on it panics half-way: it is whole even after a panic elsewhere in a holder's thread.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a chunk; `None`: it is staged already.
    pub(crate) fn reserve(
        &self,
        digest: Digest,
        write_id: WriteId,
        wanted: u8,
        now_ns: u64,
    ) -> Result<Option<Reservation<'_, R>>, Refused> {
        let admitted = self.lock().reserve(digest, write_id, wanted, now_ns)?;
        Ok(match admitted {
            Staged::Accepted { .. } => Some(Reservation { shared: self, digest, open: true }),
            Staged::AlreadyStaged => None,
        })
    }

    pub(crate) fn next(&self, tier: u8, now_ns: u64) -> Next<R> {
        let mut pending = self.lock();
        let Some(staged_ns) = pending.oldest_queued_ns(tier) else { return Next::Idle };
        if !self.gate.may_write(now_ns, Some(staged_ns)) {
            return Next::Wait { until_ns: self.gate.opens_at(staged_ns) };
        }
        pending.start(tier).map_or(Next::Idle, Next::Write)
    }
}

/// A place in staging without bytes yet. Dropped without a commit, also by a panic, it is given back.
pub(crate) struct Reservation<'a, R: Clone> {
    shared: &'a Shared<R>,
    digest: Digest,
    open: bool,
}

impl<R: Clone> Reservation<'_, R> {
    pub(crate) fn commit(mut self, record: R) -> Result<u8, Refused> {
        self.open = false;
        self.shared.lock().commit(self.digest, record)
    }
}

impl<R: Clone> Drop for Reservation<'_, R> {
    fn drop(&mut self) {
        if self.open {
            self.shared.lock().abandon(self.digest);
        }
    }
}
