//! Counters over all calls, kept under one lock so that they agree with each other.

use std::collections::BTreeMap;

use crate::{MissReason, StepReport, StoreRefusal};

#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) lookups: u64,
    pub(crate) lookup_chunks: u64,
    pub(crate) lookup_hits: u64,
    pub(crate) steps: u64,
    pub(crate) wanted: u64,
    pub(crate) hits_host_cache: u64,
    pub(crate) hits_staged: u64,
    pub(crate) hits_by_tier: Vec<u64>,
    pub(crate) bounded_step_s: f64,
    pub(crate) bound_s: f64,
    pub(crate) miss_reasons: BTreeMap<MissReason, u64>,
    pub(crate) stored: u64,
    pub(crate) already_held: u64,
    pub(crate) refused: BTreeMap<StoreRefusal, u64>,
}

impl Totals {
    pub(crate) fn count_lookup(&mut self, hits: &[bool]) {
        self.lookups += 1;
        self.lookup_chunks += hits.len() as u64;
        self.lookup_hits += hits.iter().filter(|&&hit| hit).count() as u64;
    }

    pub(crate) fn count_step(&mut self, report: &StepReport) {
        self.steps += 1;
        self.wanted += report.wanted;
        self.hits_host_cache += report.hits_host_cache;
        self.hits_staged += report.hits_staged;
        if let Some(bound_s) = report.bound_s {
            self.bounded_step_s += report.seconds;
            self.bound_s += bound_s;
        }
        self.hits_by_tier.resize(report.tiers.len(), 0);
        for (total, tier) in self.hits_by_tier.iter_mut().zip(&report.tiers) {
            *total += tier.hits;
        }
        for (reason, count) in &report.misses {
            *self.miss_reasons.entry(*reason).or_default() += count;
        }
    }
}
