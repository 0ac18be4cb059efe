//! What an engine has done since it was opened, and what it holds.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    ClaimStatus, StoreRefusal, report::MissReason, shared::Shared, sync::lock_plain,
    tier_handle::TierHandle,
};

/// Counters since open, and gauges. Serialises to the JSON that the socket answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EngineStats {
    /// Calls of `lookup`.
    pub lookups: u64,
    /// Chunks looked up.
    pub lookup_chunks: u64,
    /// Chunks of those that were readable.
    pub lookup_hits: u64,
    /// Calls of `load`.
    pub steps: u64,
    /// Chunks wanted by loads.
    pub wanted: u64,
    /// Wanted chunks delivered, counted after delivery.
    pub hits: u64,
    /// Of those, from the host cache.
    pub hits_host_cache: u64,
    /// Of those, from chunks still to be written.
    pub hits_staged: u64,
    /// Wanted chunks not delivered. `hits + misses == wanted` between loads.
    pub misses: u64,
    /// Time of the loads whose bound is known (every tier's rate alone is configured).
    pub bounded_step_s: f64,
    /// Sum of their bounds.
    pub bound_s: f64,
    /// By how much those loads took longer than their bounds: 0.05 is 5 %.
    pub gap: Option<f64>,
    /// Misses by reason.
    pub miss_reasons: BTreeMap<MissReason, u64>,
    /// Chunks staged by `store`.
    pub stored: u64,
    /// Chunks offered to `store` that were held or staged already.
    pub already_held: u64,
    /// Chunks refused by `store`, by reason.
    pub refused: BTreeMap<StoreRefusal, u64>,
    /// Chunks staged and not finished on every tier.
    pub pending_writes: u64,
    /// Replicas written.
    pub replicas_written: u64,
    /// Replicas whose write failed.
    pub replicas_failed: u64,
    /// Replicas given up under back-pressure or because their tier went away.
    pub replicas_dropped: u64,
    /// Staged chunks that no tier kept.
    pub lost_writes: u64,
    /// Chunks on any tier.
    pub chunks_held: u64,
    /// Chunks under a lease.
    pub chunks_leased: u64,
    /// Host cache.
    pub host_cache: CacheStats,
    /// Memory that reads land in, the host cache included.
    pub read_memory: MemoryStats,
    /// Memory of staged chunks.
    pub staging_memory: MemoryStats,
    /// Tiers, in the order of the configuration.
    pub tiers: Vec<TierStatus>,
}

/// The host cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CacheStats {
    /// Chunks kept.
    pub chunks: u64,
    /// Most chunks kept.
    pub chunks_max: u64,
}

/// One arena.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes of all slots.
    pub bytes: u64,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Slots that nobody holds.
    pub free_slots: u64,
    /// Bytes really on huge pages.
    pub huge_page_bytes: u64,
    /// Whether the pages are locked.
    pub locked: bool,
}

/// One tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TierStatus {
    /// As configured.
    pub name: String,
    /// Reads in flight: as configured, or as thought best by now. Steps are planned with it.
    pub window: u32,
    /// `closed` (in service), `open` (reads masked), `half_open` (one read probes), or `gone`.
    pub breaker: String,
    /// Whether writes pause because there was no room.
    pub writes_paused: bool,
    /// Space that counts against the cap.
    pub used_bytes: u64,
    /// The cap.
    pub capacity_bytes: u64,
    /// Readable chunks.
    pub chunks: u64,
    /// Of those, found at open.
    pub recovered_chunks: u64,
    /// Wanted chunks that it delivered.
    pub hits: u64,
    /// Payload bytes that it delivered first.
    pub payload_bytes: u64,
    /// Payload bytes that came too late to be used.
    pub late_bytes: u64,
    /// Payload bytes read from the device.
    pub read_bytes: u64,
    /// Payload bytes written.
    pub write_bytes: u64,
    /// Requests sent to the device.
    pub device_requests: u64,
    /// Chunks dropped to make room.
    pub evictions: u64,
    /// Chunks removed by purges.
    pub purged_chunks: u64,
    /// Chunks that the scrubber read and verified.
    pub scrubbed_chunks: u64,
    /// Payload of those.
    pub scrubbed_bytes: u64,
    /// Times that it has been through everything.
    pub scrub_passes: u64,
    /// Chunks that it found damaged and dropped.
    pub scrub_damaged: u64,
    /// Chunks that were gone or damaged.
    pub lost_chunks: u64,
    /// Reads that brought wrong bytes.
    pub corrupt_reads: u64,
    /// Reads that passed their deadline.
    pub timed_out_reads: u64,
    /// Failed operations, by kind, such as `read_io`, `read_short`, `write_no_space`.
    pub errors: BTreeMap<String, u64>,
    /// Where `window` comes from.
    pub window_search: WindowSearch,
    /// Highest number of operations in flight.
    pub in_flight_max: u64,
    /// Time in which at least one read was in flight.
    pub busy_s: f64,
    /// Live rate of reads while any is in flight; 0 until known.
    pub bytes_per_s: u64,
    /// How I/O is done, such as `io_uring+o_direct`.
    pub io_mode: String,
    /// One line per fallback taken.
    pub fallbacks: Vec<String>,
    /// Claims on it, if it takes any.
    pub claims: Option<ClaimStatus>,
}

/// Where a tier's window comes from.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WindowSearch {
    /// Reads in flight now; another number than `window` during a trial.
    pub limit: u32,
    /// The largest that may be tried.
    pub max: u32,
    /// `fixed` by the configuration, still `learning`, or `settled`: neither more nor fewer was better when last tried.
    pub state: WindowState,
    /// What reading on trial found; none before, while it runs, and where nothing was to be learned or read.
    pub probe: Option<WindowProbe>,
}

/// How far the search is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WindowState {
    /// The configuration says it.
    Fixed,
    /// It is being learned.
    #[default]
    Learning,
    /// It was learned. Rare trials go on.
    Settled,
}

/// Chunks read on trial while nobody else read: after open, or once a tier that was opened empty holds enough.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WindowProbe {
    /// The window it found to begin with; none if it was stopped before it had seen enough.
    pub window: Option<u32>,
    /// Chunks read.
    pub reads: u64,
    /// Their payload.
    pub bytes: u64,
    /// Time taken.
    pub seconds: f64,
    /// `enough` was seen, or it was stopped by `time`, `bytes`, a `step`, a `write`, a `purge`, a
    /// `failure`, or for want of `memory`.
    pub ended_by: &'static str,
}

impl Shared {
    pub(crate) fn stats(&self) -> EngineStats {
        if self.is_forked() {
            return EngineStats::default();
        }
        let totals = lock_plain(&self.totals).clone();
        let writes = self.writeback.stats();
        let (chunks_held, chunks_leased) = self.directory.counts();
        let mut tiers: Vec<TierStatus> = self.tiers.iter().map(TierHandle::status).collect();
        for (tier, hits) in tiers.iter_mut().zip(&totals.hits_by_tier) {
            tier.hits = *hits;
        }
        for (tier, desk) in tiers.iter_mut().zip(&self.desks) {
            tier.claims = desk.as_ref().map(|desk| desk.status());
        }
        let hits_by_tier: u64 = totals.hits_by_tier.iter().sum();
        EngineStats {
            lookups: totals.lookups,
            lookup_chunks: totals.lookup_chunks,
            lookup_hits: totals.lookup_hits,
            steps: totals.steps,
            wanted: totals.wanted,
            hits: totals.hits_host_cache + totals.hits_staged + hits_by_tier,
            hits_host_cache: totals.hits_host_cache,
            hits_staged: totals.hits_staged,
            bounded_step_s: totals.bounded_step_s,
            bound_s: totals.bound_s,
            gap: (totals.bound_s > 0.0).then(|| totals.bounded_step_s / totals.bound_s - 1.0),
            misses: totals.miss_reasons.values().sum(),
            miss_reasons: totals.miss_reasons,
            stored: totals.stored,
            already_held: totals.already_held,
            refused: totals.refused,
            pending_writes: writes.pending as u64,
            replicas_written: writes.replicas_written,
            replicas_failed: writes.replicas_failed,
            replicas_dropped: writes.replicas_given_up + writes.replicas_withdrawn,
            lost_writes: writes.lost_writes,
            chunks_held,
            chunks_leased,
            host_cache: CacheStats {
                chunks: self.cache.len() as u64,
                chunks_max: self.cache.capacity() as u64,
            },
            read_memory: MemoryStats::of(&self.arenas.reads),
            staging_memory: MemoryStats::of(&self.arenas.staging),
            tiers,
        }
    }
}
