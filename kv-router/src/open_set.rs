//! Chunks that were taken from their lane and can be claimed nevertheless: returned by a failed
//! read, or read in pieces that are not all claimed yet.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A set of chunk indices that may hold stale members but never lacks one for good: a chunk is
/// inserted after its word says that it can be claimed, and a scanner that removes it looks at the
/// word once more afterwards.
pub(crate) struct OpenSet {
    /// At least the number of members: raised before a bit is set and lowered after it is cleared.
    /// Written by whoever inserts or removes; read first by every claimant, to skip the scan.
    /// `AcqRel`, pairing with the claimant's `Acquire`: who sees the raise of an insert that
    /// returned, also sees its bit.
    members: AtomicU32,
    /// One bit a chunk. `AcqRel` exchanges: a scanner that clears a bit set by an insert sees the
    /// word on account of which it was set.
    bits: Box<[AtomicU64]>,
}

impl OpenSet {
    pub(crate) fn new(chunks: usize) -> Self {
        let bits = (0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { members: AtomicU32::new(0), bits }
    }

    pub(crate) fn insert(&self, chunk: u32) {
        let Some((word, bit)) = self.place(chunk) else { return };
        self.members.fetch_add(1, Ordering::AcqRel);
        if word.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            self.members.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub(crate) fn remove(&self, chunk: u32) {
        let Some((word, bit)) = self.place(chunk) else { return };
        if word.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
            self.members.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The first member, or the last.
    pub(crate) fn peek(&self, from: End) -> Option<u32> {
        if self.members.load(Ordering::Acquire) == 0 {
            return None;
        }
        let found = |(i, word): (usize, &AtomicU64)| {
            let bits = word.load(Ordering::Acquire);
            let bit = match from {
                End::Head => bits.trailing_zeros(),
                End::Tail => 63_u32.saturating_sub(bits.leading_zeros()),
            };
            let base = u32::try_from(i * 64).ok()?;
            (bits != 0).then_some(base + bit)
        };
        let mut words = self.bits.iter().enumerate();
        match from {
            End::Head => words.find_map(found),
            End::Tail => words.rev().find_map(found),
        }
    }

    fn place(&self, chunk: u32) -> Option<(&AtomicU64, u64)> {
        let word = self.bits.get(usize::try_from(chunk / 64).ok()?)?;
        Some((word, 1 << (chunk % 64)))
    }
}

/// Where a tier begins to look.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The first chunk of the step.
    Head,
    /// The last one.
    Tail,
}
