//! A look-up's answer, which stays true while it is held.

use std::{process, sync::Arc};

use kv_chunk::{ChunkKey, Digest};
use kv_staging::ClaimId;
use kv_tiers::Record;

use crate::{directory::Directory, flash::Desk};

mod table;

pub use self::table::LockTable;

/// Which of the chunks looked up are readable, and protection for those: no tier evicts them until this is dropped.
///
/// A medium that fails can still lose a leased chunk: loading it is then a miss. Dropping releases every chunk once.
/// Hold it briefly: leased chunks cannot make room for others.
#[derive(Debug)]
#[must_use = "dropping a lease lets its chunks be evicted"]
pub struct Lease {
    directory: Arc<Directory>,
    digests: Vec<Digest>,
    hits: Vec<bool>,
    /// Chunks that only memory held at look-up: kept alive here.
    records: Vec<Arc<Record>>,
    /// Given up with this lease.
    claims: Vec<(Arc<Desk>, ClaimId)>,
    owner_pid: u32,
}

impl Lease {
    pub(crate) fn new(directory: &Arc<Directory>, chunks: usize) -> Self {
        Self {
            directory: Arc::clone(directory),
            digests: Vec::with_capacity(chunks),
            hits: Vec::with_capacity(chunks),
            records: Vec::new(),
            claims: Vec::new(),
            owner_pid: process::id(),
        }
    }

    /// Adds a chunk that the directory has counted a lease for (`hit`), or a miss.
    pub(crate) fn push(&mut self, digest: Digest, hit: bool, record: Option<Arc<Record>>) {
        self.digests.push(digest);
        self.hits.push(hit);
        self.records.extend(record);
    }

    /// Has claims cancelled with this lease.
    pub(crate) fn keep_claims(&mut self, claims: Vec<(Arc<Desk>, ClaimId)>) {
        self.claims = claims;
    }

    /// The record of a chunk that only memory held when it was looked up.
    pub(crate) fn record(&self, key: &ChunkKey) -> Option<&Arc<Record>> {
        self.records.iter().find(|record| record.header().verify_key(key).is_ok())
    }

    /// One answer per key, in the order asked.
    pub fn hits(&self) -> &[bool] {
        &self.hits
    }

    /// One lease for each chunk that was a hit, in the order asked: each protects its chunk until it is dropped.
    pub fn split(mut self) -> Vec<Option<Self>> {
        let digests = std::mem::take(&mut self.digests);
        let hits = std::mem::take(&mut self.hits);
        let mut records = std::mem::take(&mut self.records);
        let one = |(digest, hit): (Digest, bool)| {
            hit.then(|| {
                let mut lease = Self::new(&self.directory, 1);
                let at = records.iter().position(|record| record.digest() == digest);
                lease.push(digest, true, at.map(|at| records.swap_remove(at)));
                lease.owner_pid = self.owner_pid;
                lease
            })
        };
        digests.into_iter().zip(hits).map(one).collect()
    }

    /// Hits before the first miss.
    pub fn prefix_hits(&self) -> usize {
        self.hits.iter().take_while(|&&hit| hit).count()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // In a forked child another thread may hold the locks for ever, and the leases are the parent's.
        if process::id() != self.owner_pid {
            return;
        }
        self.claims.iter().for_each(|(desk, claim)| desk.cancel_claim(*claim));
        for (digest, _) in self.digests.iter().zip(&self.hits).filter(|(_, hit)| **hit) {
            self.directory.release(*digest);
        }
    }
}
