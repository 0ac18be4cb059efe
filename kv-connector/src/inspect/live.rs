//! Purges while the engine serves: what is asked of the tier threads, and what they answer.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, atomic::Ordering},
    time::Duration,
};

use kv_chunk::{Digest, KeyParts};
use kv_tiers::Record;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{KeptChunk, Selector, list::LISTED_MAX};
use crate::{
    clock::{now_ns, ns_from_ms},
    shared::Shared,
    sync::lock_plain,
};

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long everything but waiting for leases may take.
const WORK_NS: u64 = 600_000_000_000;

/// What to remove from a running engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct PurgeRequest {
    /// Which chunks.
    pub selector: Selector,
    /// Only count them.
    pub dry_run: bool,
    /// How long leased chunks are waited for.
    pub wait_ms: u64,
}

impl PurgeRequest {
    /// Removes what `selector` names, and leaves what is leased now.
    pub fn new(selector: Selector) -> Self {
        Self { selector, ..Self::default() }
    }
}

/// Why a purge did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PurgeRefusal {
    /// One at a time.
    #[error("another purge runs: ask again when it has ended")]
    Busy,
    /// The request names neither a model nor a salt.
    #[error("nothing is selected: name a model or a salt")]
    Nothing,
    /// The engine is closed, or this process is a fork of the one that opened it.
    #[error("the engine is closed")]
    Closed,
}

/// What a purge did. Chunks stored after it began are not its concern.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PurgeReport {
    /// In the order of the configuration.
    pub tiers: Vec<TierPurge>,
    /// Chunks dropped from the host cache.
    pub host_cache_chunks: u64,
    /// Staged chunks that could not be written before it, and may be published after it.
    pub staged_chunks: u64,
    /// Nothing was to be removed.
    pub dry_run: bool,
    /// Every tier was looked through, nothing selected is left, and a crash would not bring any of it back. Never true
    /// of a dry run that found something. Of a directory that many nodes share only what this node has met was looked
    /// at: for the rest, [`purge_offline`](super::purge_offline) what [`open_beside`](super::Offline::open_beside) opens.
    pub complete: bool,
}

/// What a purge did in one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierPurge {
    /// As configured.
    pub name: String,
    /// Chunks looked at.
    pub chunks: u64,
    /// Those selected.
    pub matched_chunks: u64,
    /// Payload of those.
    pub matched_bytes: u64,
    /// Removed.
    pub removed_chunks: u64,
    /// Left, since they were leased until the end.
    pub leased_chunks: u64,
    /// Whose owner could not be told, since their headers could not be read.
    pub unknown_chunks: u64,
    /// The tier was looked through to its end, and its removals have reached the medium.
    pub complete: bool,
}

/// A purge on its way through the tier threads.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) selector: Selector,
    pub(crate) dry_run: bool,
    /// Leased chunks are given up then.
    pub(crate) patience_ns: u64,
    /// Everything is given up then.
    pub(crate) end_ns: u64,
    answers: Mutex<Vec<Option<TierPurge>>>,
    answered: Condvar,
    /// What was matched, for who asked for a list.
    seen: Option<Mutex<HashMap<Digest, KeptChunk>>>,
}

impl Errand {
    fn new(request: &PurgeRequest, tiers: usize) -> Self {
        let patience_ns = now_ns().saturating_add(ns_from_ms(request.wait_ms));
        Self {
            selector: request.selector.clone(),
            dry_run: request.dry_run,
            patience_ns,
            end_ns: patience_ns.saturating_add(WORK_NS),
            answers: Mutex::new(vec![None; tiers]),
            answered: Condvar::new(),
            seen: None,
        }
    }

    /// Lists what is selected, and removes nothing.
    pub(super) fn to_list(selector: &Selector, tiers: usize) -> Self {
        let request = PurgeRequest { dry_run: true, ..PurgeRequest::new(selector.clone()) };
        Self { seen: Some(Mutex::default()), ..Self::new(&request, tiers) }
    }

    /// A chunk that is selected.
    pub(crate) fn see(&self, digest: Digest, canonical: &[u8], payload_bytes: u64) {
        let Some(seen) = &self.seen else { return };
        let mut seen = lock_plain(seen);
        if seen.len() < LISTED_MAX
            && let Ok(key) = KeyParts::parse(canonical)
        {
            seen.insert(digest, KeptChunk { digest, key, payload_bytes });
        }
    }

    pub(super) fn take_seen(&self) -> Vec<KeptChunk> {
        let seen = self.seen.as_ref().map(|seen| std::mem::take(&mut *lock_plain(seen)));
        seen.unwrap_or_default().into_values().collect()
    }

    pub(crate) fn answer(&self, tier: usize, answer: TierPurge) {
        if let Some(place) = lock_plain(&self.answers).get_mut(tier) {
            *place = Some(answer);
        }
        self.answered.notify_all();
    }

    /// Waits for all answers while `open`.
    fn wait(&self, open: impl Fn() -> bool) -> Vec<Option<TierPurge>> {
        let mut answers = lock_plain(&self.answers);
        while answers.iter().any(Option::is_none) && open() && now_ns() < self.end_ns {
            let waited = self.answered.wait_timeout(answers, LOOK_EVERY);
            answers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        answers.clone()
    }
}

impl Shared {
    /// The right to send an errand: one runs at a time.
    pub(super) fn errand_right(
        &self,
        selector: &Selector,
    ) -> Result<MutexGuard<'_, ()>, PurgeRefusal> {
        if !self.is_usable() {
            return Err(PurgeRefusal::Closed);
        }
        if selector.is_empty() {
            return Err(PurgeRefusal::Nothing);
        }
        match self.purging.try_lock() {
            Ok(one) => Ok(one),
            Err(TryLockError::Poisoned(one)) => Ok(one.into_inner()),
            Err(TryLockError::WouldBlock) => Err(PurgeRefusal::Busy),
        }
    }

    /// Sends an errand to all tiers and waits for their answers.
    pub(super) fn run_errand(&self, errand: &Arc<Errand>) -> Vec<Option<TierPurge>> {
        for tier in &self.tiers {
            if !tier.push_errand(errand) {
                // Its chunks went with it.
                errand.answer(tier.id.index(), TierPurge::default());
            }
        }
        errand.wait(|| !self.closed.load(Ordering::Acquire))
    }

    pub(crate) fn purge(&self, request: &PurgeRequest) -> Result<PurgeReport, PurgeRefusal> {
        let _one = self.errand_right(&request.selector)?;
        let dry_run = request.dry_run;
        // What is staged is found on the tiers then.
        let wait_ms = self.config.close_deadline_ms;
        let staged_chunks = self.flush(Duration::from_millis(wait_ms)).pending;
        let answers = self.run_errand(&Arc::new(Errand::new(request, self.tiers.len())));
        let selected = |record: &Record| {
            request.selector.matches(record.header().canonical_key()) == Some(true)
        };
        // After the tiers: a load keeps nothing here that no tier holds.
        let host_cache_chunks = if dry_run { 0 } else { self.cache.remove_if(selected) };
        let named = self.tiers.iter().zip(answers).map(|(tier, answer)| TierPurge {
            name: tier.name.clone(),
            ..answer.unwrap_or_default()
        });
        let tiers: Vec<TierPurge> = named.collect();
        let left = |tier: &TierPurge| tier.matched_chunks > tier.removed_chunks;
        let complete = tiers.iter().all(|tier| tier.complete && !left(tier));
        let complete = complete && staged_chunks == 0;
        tracing::info!(?tiers, host_cache_chunks, dry_run, complete, "purged");
        Ok(PurgeReport { tiers, host_cache_chunks, staged_chunks, dry_run, complete })
    }
}
