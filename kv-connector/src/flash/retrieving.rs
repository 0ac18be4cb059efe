//! Reads of chunks that somebody has claimed: from the first read to the copy out.

use std::{collections::HashSet, process, sync::Arc};

use kv_chunk::Digest;
use kv_staging::ClaimId;

use super::Desk;

/// Claims whose chunks are being read. What is protected stays so while this lives.
#[derive(Debug)]
pub(crate) struct Retrieving {
    begun: Vec<(Arc<Desk>, Vec<ClaimId>)>,
    owner_pid: u32,
}

impl Retrieving {
    /// `None` if nobody claimed what is read.
    pub(crate) fn begin(
        desks: &[Option<Arc<Desk>>],
        wanted: impl Iterator<Item = Digest>,
    ) -> Option<Self> {
        if desks.iter().all(Option::is_none) {
            return None;
        }
        let wanted: HashSet<Digest> = wanted.collect();
        let begin = |desk: &Arc<Desk>| (Arc::clone(desk), desk.begin(&wanted));
        let begun = desks.iter().flatten().map(begin).filter(|(_, claims)| !claims.is_empty());
        let begun: Vec<_> = begun.collect();
        (!begun.is_empty()).then(|| Self { begun, owner_pid: process::id() })
    }
}

impl Drop for Retrieving {
    fn drop(&mut self) {
        // In a forked child somebody may hold the lock for ever, and the claims are the parent's.
        if process::id() == self.owner_pid {
            self.begun.iter().for_each(|(desk, claims)| desk.finish(claims));
        }
    }
}
