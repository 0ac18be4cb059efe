//! Removing what belongs to one model or one tenant, while no engine runs.

use std::{collections::HashSet, fs::File, sync::Arc};

use kv_chunk::Digest;
use kv_tiers::{Arena, Tier};
use nix::unistd::syncfs;
use serde::Serialize;

use super::{
    Offline, OfflineTier, Selector, TierState,
    read::{Depth, Pace, Reader, Seen, settle},
};
use crate::{EngineError, clock::now_ns};

/// What a purge did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OfflinePurge {
    /// In the order of the configuration.
    pub tiers: Vec<TierPurgeOffline>,
    /// Nothing was to be removed.
    pub dry_run: bool,
}

/// What it did in one tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TierPurgeOffline {
    /// As configured.
    pub name: String,
    /// Whether there was anything.
    pub state: Option<TierState>,
    /// Chunks that its index named.
    pub chunks: u64,
    /// Those selected.
    pub matched_chunks: u64,
    /// Payload of those.
    pub matched_bytes: u64,
    /// Removed, and not found by a second opening.
    pub removed_chunks: u64,
    /// Whose owner cannot be told since their headers cannot be read.
    pub unknown_chunks: u64,
    /// Found again by the second opening, or not removed.
    pub left_chunks: u64,
    /// The device completed nothing any more.
    pub stalled: bool,
}

impl OfflinePurge {
    /// Nothing that is selected, or may be, is left. False after a dry run that found any.
    pub fn is_complete(&self) -> bool {
        self.tiers.iter().all(|tier| {
            let left = if self.dry_run { tier.matched_chunks } else { tier.left_chunks };
            left == 0 && tier.unknown_chunks == 0 && !tier.stalled
        })
    }
}

/// Removes every chunk that `selector` names from every tier: their index entries and headers are wiped and synced, and a
/// second opening must not find them. Their payload is overwritten when the space is used again.
///
/// # Errors
/// If a tier cannot be opened a second time.
pub fn purge_offline(
    offline: &mut Offline,
    selector: &Selector,
    dry_run: bool,
    each: &mut dyn FnMut() -> bool,
) -> Result<OfflinePurge, EngineError> {
    let arena = Arc::clone(&offline.arena);
    let mut report = OfflinePurge { dry_run, ..OfflinePurge::default() };
    for tier in &mut offline.tiers {
        report.tiers.push(purge_tier(tier, &arena, selector, dry_run, each)?);
    }
    Ok(report)
}

fn purge_tier(
    tier: &mut OfflineTier,
    arena: &Arc<Arena>,
    selector: &Selector,
    dry_run: bool,
    each: &mut dyn FnMut() -> bool,
) -> Result<TierPurgeOffline, EngineError> {
    let mut found = TierPurgeOffline {
        name: tier.name.clone(),
        state: Some(tier.state),
        chunks: tier.tier.as_ref().map_or(0, |tier| tier.stats().chunks),
        ..TierPurgeOffline::default()
    };
    let Some(inner) = tier.tier.as_deref_mut() else { return Ok(found) };
    let mut matched: HashSet<Digest> = HashSet::new();
    let mut look = |tier: &mut dyn Tier, seen: Seen| {
        let canonical = seen.header.as_ref().map(|header| header.canonical_key());
        match canonical.and_then(|canonical| selector.matches(canonical)) {
            None => found.unknown_chunks += 1,
            Some(false) => {}
            Some(true) => {
                found.matched_chunks += 1;
                found.matched_bytes += seen.held.payload_bytes;
                matched.insert(seen.digest);
                if !dry_run {
                    tier.remove(seen.digest, now_ns());
                }
            }
        }
        each()
    };
    let mut reader = Reader::new(inner, arena, Depth::Header);
    found.stalled = reader.visit_all(&mut Pace::new(None), &mut look).is_err();
    if dry_run || matched.is_empty() {
        return Ok(found);
    }
    found.stalled |= !settle(inner);
    tier.reopen(arena)?;
    if let Some(directory) = tier.path.as_ref().and_then(|path| File::open(path).ok()) {
        // What a file system cannot sync it will not keep either.
        let _ = syncfs(&directory);
    }
    let found_again =
        |digest: &&Digest| tier.tier.as_ref().is_some_and(|tier| tier.contains(**digest).is_some());
    let left = matched.iter().filter(found_again).count() as u64;
    (found.left_chunks, found.removed_chunks) = (left, found.matched_chunks - left);
    Ok(found)
}
