//! What one load did.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Outcome, Source};

/// Why a wanted chunk was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MissReason {
    /// The load did not get to it.
    NotLoaded,
    /// Nothing holds it.
    NotHeld,
    /// Only tiers hold it that the caller excluded or that are out of service.
    TierMasked,
    /// `dest` is not as long as the payload.
    WrongLength,
    /// The last tier that held it failed to read it.
    Io,
    /// The last tier that held it did not read it in time.
    TimedOut,
    /// What the last tier brought was not this chunk, whole and unchanged.
    Corrupt,
    /// The last tier that was thought to hold it does not.
    Lost,
    /// The last tier that held it is gone.
    TierGone,
    /// The step's deadline passed first.
    StepDeadline,
    /// The engine is closed, or this process is a fork of the one that opened it.
    Closed,
}

/// What one call of [`Engine::load`](crate::Engine::load) did. `hits() + misses() == wanted`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// Chunks wanted, duplicates included.
    pub wanted: u64,
    /// Delivered from the host cache.
    pub hits_host_cache: u64,
    /// Delivered from chunks still to be written.
    pub hits_staged: u64,
    /// Delivered from each tier, in the order of the configuration.
    pub tiers: Vec<TierShare>,
    /// Not delivered, by reason.
    pub misses: BTreeMap<MissReason, u64>,
    /// Payload copied from the host cache and from staged chunks.
    pub memory_bytes: u64,
    /// Time for those copies: hidden behind storage reads as far as those last.
    pub memory_s: f64,
    /// Payload delivered from storage, each wanted chunk once, without duplicates.
    pub storage_bytes: u64,
    /// Bytes that storage delivered a second time.
    pub duplicate_bytes: u64,
    /// Wall time of the load.
    pub seconds: f64,
    /// Time in which the tiers, each at its known rate alone, could have moved `storage_bytes`; if all are known.
    pub bound_s: Option<f64>,
}

/// One tier's part of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TierShare {
    /// Wanted chunks that it delivered, or completed.
    pub hits: u64,
    /// Payload bytes that it delivered first.
    pub payload_bytes: u64,
    /// Payload bytes that came too late to be used.
    pub late_bytes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Pieces of another staging than the chunk's other pieces: each had its chunk read again, whole.
    pub mixed_pieces: u64,
    /// Time in which at least one read of the step was in flight.
    pub busy_s: f64,
}

impl StepReport {
    pub(crate) fn new(wanted: usize, tiers: usize) -> Self {
        Self { wanted: wanted as u64, tiers: vec![TierShare::default(); tiers], ..Self::default() }
    }

    /// Chunks delivered.
    pub fn hits(&self) -> u64 {
        self.hits_host_cache + self.hits_staged + self.storage_hits()
    }

    /// Chunks delivered from storage.
    pub fn storage_hits(&self) -> u64 {
        self.tiers.iter().map(|tier| tier.hits).sum()
    }

    /// Chunks not delivered.
    pub fn misses(&self) -> u64 {
        self.misses.values().sum()
    }

    pub(crate) fn count(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Hit(Source::HostCache) => self.hits_host_cache += 1,
            Outcome::Hit(Source::Staged) => self.hits_staged += 1,
            Outcome::Hit(Source::Tier(tier)) => self.tiers[usize::from(tier)].hits += 1,
            Outcome::Miss(reason) => *self.misses.entry(reason).or_default() += 1,
        }
    }
}
