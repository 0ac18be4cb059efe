//! Claims in statistics.

use std::collections::BTreeMap;

use kv_staging::{ClaimState, Controller};
use serde::Serialize;

use crate::{FlashPolicy, FlashReservation, FlashSection, clock::seconds};

/// Claims on one tier since it was opened. Read C beside the load: most of what staging in time saves depends on the length
/// of the queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ClaimStatus {
    /// When claims are staged.
    pub policy: FlashPolicy,
    /// From when they count as protected.
    pub reservation: FlashReservation,
    /// What keeps staged bytes there: `hard`, `advisory` (the process may not lock memory) or `none`.
    pub protection: &'static str,
    /// What times until use are projected from: `tokens` (of a schedule), or `times` (as callers say, or the pace of the
    /// retrievals so far).
    pub use_by: &'static str,
    /// Most bytes that may be protected.
    pub budget_bytes: u64,
    /// Bytes that count in it now.
    pub reserved_bytes: u64,
    /// Most that did.
    pub reserved_bytes_max: u64,
    /// Bytes that the device protects now.
    pub protected_bytes: u64,
    /// Most that it did.
    pub protected_bytes_max: u64,
    /// C: reserved bytes over time, in GiB seconds.
    pub c_gib_s: f64,
    /// That, for each claim that has ended.
    pub c_gib_s_per_claim: f64,
    /// Living claims, by state.
    pub states: BTreeMap<&'static str, u64>,
    /// Recorded.
    pub recorded: u64,
    /// Times that a caller said another time of use.
    pub revised: u64,
    /// Schedules told.
    pub schedules: u64,
    /// Chosen to be staged.
    pub committed: u64,
    /// Of which everything became ready.
    pub ready: u64,
    /// Whose retrieval began after that ...
    pub early: u64,
    /// ... so much later, in sum.
    pub early_s: f64,
    /// Whose retrieval began before.
    pub late: u64,
    /// That did not fit the budget when their time came.
    pub blocked: u64,
    /// Retrieved without protection.
    pub demand: u64,
    /// Of which something could not be staged.
    pub failed: u64,
    /// Given up by their callers, those that expired included.
    pub cancelled: u64,
    /// That nobody revised or read in time.
    pub expired: u64,
    /// Refused: too many, or the engine closes.
    pub refused: u64,
    /// That hold nothing any more.
    pub released: u64,
    /// Chunks read while they were protected.
    pub protected_chunks: u64,
    /// Chunks of claims read without.
    pub demand_chunks: u64,
    /// Chunks staged.
    pub staged_chunks: u64,
    /// Bytes of those that were not there before.
    pub staged_bytes: u64,
    /// Chunks that could not be staged.
    pub failed_chunks: u64,
    /// Measured rate of staging.
    pub staging_bytes_per_s: u64,
}

/// What only the staging thread knows.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) protection: &'static str,
    pub(super) protected_bytes: u64,
    pub(super) protected_bytes_max: u64,
    pub(super) staged_chunks: u64,
    pub(super) staged_bytes: u64,
    pub(super) failed_chunks: u64,
    pub(super) bytes_per_s: u64,
    pub(super) by_tokens: bool,
}

impl ClaimStatus {
    pub(super) fn new(
        section: &FlashSection,
        controller: &Controller,
        told: &Told,
        now_ns: u64,
    ) -> Self {
        let report = controller.report(now_ns);
        let budget = controller.budget();
        let mut states: BTreeMap<&'static str, u64> = STATES.map(|(_, name)| (name, 0)).into();
        for claim in controller.claims() {
            *states.entry(name(claim.state())).or_default() += 1;
        }
        let early_ns = u64::try_from(report.early_ns).unwrap_or(u64::MAX);
        #[expect(clippy::cast_precision_loss, reason = "a report")]
        let c_gib_s = report.protected_byte_ns as f64 / (1_u64 << 30) as f64 / 1e9;
        Self {
            policy: section.policy,
            reservation: section.reservation,
            protection: told.protection,
            use_by: if told.by_tokens { "tokens" } else { "times" },
            budget_bytes: budget.capacity_bytes(),
            reserved_bytes: budget.protected_bytes(),
            reserved_bytes_max: report.peak_bytes,
            protected_bytes: told.protected_bytes,
            protected_bytes_max: told.protected_bytes_max,
            c_gib_s,
            c_gib_s_per_claim: report.c_per_claim_gib_s(),
            states,
            recorded: report.recorded,
            committed: report.committed,
            ready: report.ready,
            early: report.early,
            early_s: seconds(early_ns),
            late: report.late,
            blocked: report.blocked,
            demand: report.demand,
            failed: report.failed,
            cancelled: report.cancelled,
            released: report.released,
            staged_chunks: told.staged_chunks,
            staged_bytes: told.staged_bytes,
            failed_chunks: told.failed_chunks,
            staging_bytes_per_s: told.bytes_per_s,
            ..Self::default()
        }
    }
}

const STATES: [(ClaimState, &str); 8] = [
    (ClaimState::Recorded, "recorded"),
    (ClaimState::Eligible, "eligible"),
    (ClaimState::Committed, "committed"),
    (ClaimState::Staging, "staging"),
    (ClaimState::Ready, "ready"),
    (ClaimState::Retrieving, "retrieving"),
    (ClaimState::StageDraining, "stage_draining"),
    (ClaimState::RetrievalDraining, "retrieval_draining"),
];

fn name(state: ClaimState) -> &'static str {
    STATES.iter().find(|(known, _)| *known == state).map_or("released", |(_, name)| name)
}
