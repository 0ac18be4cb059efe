//! `kvbraid fsck`: every chunk of every tier is read and verified.

use std::collections::BTreeMap;

use kv_tiers::FindingKind;
use serde::Serialize;

use super::{
    Damage, Offline, OfflineTier, TierState,
    read::{Depth, Ended, Pace, Reader, Seen, settle},
};
use crate::{
    EngineError,
    clock::{now_ns, seconds},
};

/// How a check is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckOptions {
    /// Read no more than so many bytes a second; no limit by default.
    pub bytes_per_s: Option<u64>,
    /// Remove what is damaged, and nothing else.
    pub repair: bool,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CheckReport {
    /// In the order of the configuration.
    pub tiers: Vec<TierCheck>,
    /// The caller asked to stop before the end.
    pub stopped: bool,
}

/// What was found in one tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TierCheck {
    /// As configured.
    pub name: String,
    /// Whether there was anything to check.
    pub state: Option<TierState>,
    /// Chunks that its index names.
    pub chunks: u64,
    /// Those that were read to their end and are whole.
    pub whole_chunks: u64,
    /// Payload of those.
    pub whole_bytes: u64,
    /// Damaged chunks by kind.
    pub damaged: BTreeMap<Damage, u64>,
    /// Headers of chunks that the index does not name since they are not whole.
    pub torn_slots: u64,
    /// Files of the store that are damaged beyond use.
    pub damaged_files: Vec<String>,
    /// Files that an interrupted run left: no damage, and gone after the next start of an engine.
    pub leftovers: Vec<String>,
    /// Files that are not the store's, or of a later version: never touched.
    pub foreign_files: Vec<String>,
    /// Chunks that a later version wrote: never touched.
    pub newer_chunks: u64,
    /// Chunks of a shared directory that another node removed or wrote anew meanwhile: no damage.
    pub changed_chunks: u64,
    /// Space that the cap counts.
    pub used_bytes: u64,
    /// The cap.
    pub capacity_bytes: u64,
    /// Damaged chunks that were removed.
    pub removed_chunks: u64,
    /// Damaged files and torn headers that were removed.
    pub removed_others: u64,
    /// The device completed nothing any more: the rest was not read.
    pub stalled: bool,
    /// How long it took.
    pub seconds: f64,
}

impl CheckReport {
    /// Every chunk is whole, and all of it was read.
    pub fn is_clean(&self) -> bool {
        !self.stopped && self.tiers.iter().all(TierCheck::is_clean)
    }
}

impl TierCheck {
    /// Every chunk is whole, and all of it was read.
    pub fn is_clean(&self) -> bool {
        !self.stalled
            && self.damaged.is_empty()
            && self.torn_slots == 0
            && self.damaged_files.is_empty()
    }
}

/// Reads and verifies everything. `each` is called after every chunk; false from it stops.
///
/// # Errors
/// If a tier cannot be opened again after its repair.
pub fn check(
    offline: &mut Offline,
    options: &CheckOptions,
    each: &mut dyn FnMut() -> bool,
) -> Result<CheckReport, EngineError> {
    let mut report = CheckReport::default();
    let arena = std::sync::Arc::clone(&offline.arena);
    for tier in &mut offline.tiers {
        let began_ns = now_ns();
        let mut found = read_all(tier, &arena, options, each, &mut report.stopped);
        let others = found.torn_slots + found.damaged_files.len() as u64;
        if options.repair && others > 0 && !report.stopped {
            tier.mend(&arena)?;
            let left = tier.torn_slots + tier.found(FindingKind::Damaged).len() as u64;
            found.removed_others = others.saturating_sub(left);
        }
        found.seconds = seconds(now_ns().saturating_sub(began_ns));
        report.tiers.push(found);
    }
    Ok(report)
}

fn read_all(
    tier: &mut OfflineTier,
    arena: &std::sync::Arc<kv_tiers::Arena>,
    options: &CheckOptions,
    each: &mut dyn FnMut() -> bool,
    stopped: &mut bool,
) -> TierCheck {
    let mut found = TierCheck {
        name: tier.name.clone(),
        state: Some(tier.state),
        chunks: tier.tier.as_ref().map_or(0, |tier| tier.stats().chunks),
        torn_slots: tier.torn_slots,
        newer_chunks: tier.newer_chunks,
        damaged_files: tier.found(FindingKind::Damaged),
        leftovers: tier.found(FindingKind::Leftover),
        foreign_files: tier.found(FindingKind::LeftAlone),
        ..TierCheck::default()
    };
    let Some(inner) = tier.tier.as_deref_mut() else { return found };
    let is_shared = inner.capabilities().shared;
    let mut count = |tier: &mut dyn kv_tiers::Tier, seen: Seen| {
        match seen.damage {
            None => {
                found.whole_chunks += 1;
                found.whole_bytes += seen.held.payload_bytes;
            }
            Some(Damage::Newer) => found.newer_chunks += 1,
            Some(Damage::Missing | Damage::Index) if is_shared => found.changed_chunks += 1,
            // Its pieces may be of two writings.
            Some(_) if tier.contains(seen.digest) != Some(seen.held) && is_shared => {
                found.changed_chunks += 1;
            }
            Some(damage) => {
                *found.damaged.entry(damage).or_default() += 1;
                if options.repair && damage.is_repairable() && tier.remove(seen.digest, now_ns()) {
                    found.removed_chunks += 1;
                }
            }
        }
        each()
    };
    if !*stopped {
        let mut pace = Pace::new(options.bytes_per_s);
        let mut reader = Reader::new(inner, arena, Depth::All);
        let ended = reader.visit_all(&mut pace, &mut count);
        *stopped = ended == Err(Ended::Stopped);
        found.stalled = ended == Err(Ended::Stalled);
    }
    if !found.stalled {
        found.stalled = !settle(inner);
    }
    let stats = inner.stats();
    (found.used_bytes, found.capacity_bytes) = (stats.used_bytes, stats.capacity_bytes);
    found
}
