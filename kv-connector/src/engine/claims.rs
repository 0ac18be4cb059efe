//! Claims: what a request will read from a tier of kind flash is said beforehand.

use std::{sync::Arc, time::Duration};

use kv_chunk::{ChunkKey, Digest};

use super::Engine;
use crate::{
    Lease,
    clock::{now_ns, ns_of},
    flash::{Desk, Schedule},
};

/// What a claim found on tiers of kind flash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claimed {
    /// Chunks claimed.
    pub chunks: u64,
    /// Memory that they will take once they are staged.
    pub bytes: u64,
    /// Some tier takes no more claims, or the engine is closed: those chunks are read as without a claim.
    pub refused: bool,
}

impl Engine {
    /// Says that `request` will read those of `keys` that tiers of kind flash hold: metadata, no memory. When the time until
    /// use falls to the time until ready, they are protected and staged in fast memory, within the tier's budget. The claim
    /// ends when the last of its chunks was loaded, by whomever: what was read once is in memory above. A second claim of a
    /// request replaces the first.
    ///
    /// `time_to_use` is how long from now the load is expected; `None` where the caller cannot tell: then it is projected
    /// from the claims before it and how fast they were read.
    ///
    /// A claim protects nothing from eviction before it is staged, and promises nothing: what is not ready when it is
    /// loaded is read through the flash.
    pub fn claim(
        &self,
        request: &str,
        keys: &[ChunkKey],
        time_to_use: Option<Duration>,
    ) -> Claimed {
        let mut claimed = Claimed::default();
        if !self.shared.is_usable() {
            return Claimed { refused: true, ..claimed };
        }
        let shared = &self.shared;
        // What memory holds needs no staging.
        let digests: Vec<Digest> = keys
            .iter()
            .filter(|key| shared.in_memory(key).is_none())
            .map(ChunkKey::digest)
            .collect();
        for desk in self.desks() {
            match desk.claim(request, &digests, use_at_ns(time_to_use)) {
                Some((chunks, bytes)) => {
                    claimed.chunks += chunks;
                    claimed.bytes += bytes;
                }
                None => claimed.refused = true,
            }
        }
        claimed
    }

    /// As [`lookup`](Self::lookup), and claims what it found for `request`, as [`claim`](Self::claim) does. Dropping the
    /// lease cancels the claim.
    pub fn lookup_for(
        &self,
        request: &str,
        keys: &[ChunkKey],
        time_to_use: Option<Duration>,
    ) -> Lease {
        let mut lease = self.lookup(keys);
        let hits = keys.iter().zip(lease.hits()).filter(|(_, hit)| **hit);
        let hits: Vec<ChunkKey> = hits.map(|(key, _)| key.clone()).collect();
        if self.claim(request, &hits, time_to_use).chunks > 0 {
            let claims =
                self.desks().filter_map(|desk| Some((Arc::clone(desk), desk.id(request)?)));
            lease.keep_claims(claims.collect());
        }
        lease
    }

    /// Another time until the use of what `request` claimed. False: it has no claim.
    pub fn revise(&self, request: &str, time_to_use: Option<Duration>) -> bool {
        let use_at_ns = use_at_ns(time_to_use);
        let revise = |had, desk: &Arc<Desk>| desk.revise(request, use_at_ns) | had;
        self.shared.is_usable() && self.desks().fold(false, revise)
    }

    /// Says what the caller's scheduler runs and has waiting, after each of its iterations: for the claims of requests that it
    /// names this replaces all other times until use. From tokens the engine knows the *chance* that a claim is used before
    /// it could be ready, and policy `tempo_q` weighs it against the bytes; without a schedule it goes by a low quantile.
    /// A claim that the last schedule does not name, and whose caller has given no time, waits for the next.
    ///
    /// Returns how many claims it names. Costs the caller a look-up for each waiting request; the projection is made by
    /// another thread, of the latest schedule only.
    pub fn schedule(&self, mut schedule: Schedule) -> usize {
        if !self.shared.is_usable() {
            return 0;
        }
        // More slots than requests decide nothing, and a projection has room for each.
        schedule.slots = schedule.slots.min(schedule.running.len() + schedule.waiting.len());
        let schedule = Arc::new(schedule);
        self.desks().map(|desk| desk.schedule(&schedule)).sum()
    }

    /// Gives up what `request` claimed, in any state: what is being staged or read stays protected until that is done.
    /// False: it has no claim.
    pub fn cancel(&self, request: &str) -> bool {
        let cancel = |had, desk: &Arc<Desk>| desk.cancel(request) | had;
        self.shared.is_usable() && self.desks().fold(false, cancel)
    }

    fn desks(&self) -> impl Iterator<Item = &Arc<Desk>> {
        self.shared.desks.iter().flatten()
    }
}

fn use_at_ns(time_to_use: Option<Duration>) -> Option<u64> {
    Some(now_ns().saturating_add(ns_of(time_to_use?)))
}
