//! A provider whose user is told nothing: how some real devices present themselves.

use crate::{
    ArenaView, Caps, Extent, FastTier, FastTierError, Load, Residency, ResidencyReport, StageEvent,
    StageId, Staging,
};

/// Hides residency, completion and load of `T`, so that what works on it needs none of them. Protection, limits and
/// refusals stay as they are.
#[derive(Debug)]
pub struct Blind<T> {
    inner: T,
    caps: Caps,
    hidden: Vec<StageEvent>,
}

impl<T: FastTier> Blind<T> {
    /// Hides `inner`.
    pub fn new(inner: T) -> Self {
        let mut caps = *inner.caps();
        caps.residency = ResidencyReport::Unknown;
        if caps.staging != Staging::TouchOnly {
            caps.staging = Staging::Async { completion: false };
        }
        Self { inner, caps, hidden: Vec::new() }
    }

    /// What is hidden, for a test to look behind.
    pub fn inner(&self) -> &T {
        &self.inner
    }
}

#[deny(clippy::missing_trait_methods)]
impl<T: FastTier> FastTier for Blind<T> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn arena(&self) -> ArenaView {
        self.inner.arena()
    }

    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError> {
        self.inner.residency(extents).map(|_| Residency::Unknown)
    }

    fn submit_stage(
        &mut self,
        id: StageId,
        extents: &[Extent],
        now_ns: u64,
    ) -> Result<(), FastTierError> {
        self.inner.submit_stage(id, extents, now_ns)
    }

    /// Appends nothing. The time to be called next is passed on, since some providers work only when they are called.
    fn poll(&mut self, now_ns: u64, _events: &mut Vec<StageEvent>) -> Option<u64> {
        let wake_ns = self.inner.poll(now_ns, &mut self.hidden);
        self.hidden.clear();
        wake_ns
    }

    fn protect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.inner.protect(extents, now_ns)
    }

    fn unprotect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.inner.unprotect(extents, now_ns)
    }

    fn evict_hint(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.inner.evict_hint(extents, now_ns)
    }

    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError> {
        self.inner.flush(extents)
    }

    fn load(&self) -> Load {
        Load { queued_bytes: None, bytes_per_s: None }
    }
}
