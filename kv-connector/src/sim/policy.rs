//! The rival ways to share a step among tiers, all of them run by the one router: what differs is
//! which tiers a chunk may be read from, and what happens at the end of the step.

use kv_router::{ChunkSpec, PoolConfig, Tail, TierMask};

use super::{
    case::{CHUNK_BLOCKS, CHUNK_BYTES, Case},
    machine::Machine,
    profile::Profile,
};

/// Requests of a step, where a policy serves them one after another.
const REQUESTS: usize = 7;
/// How fast a request's chunks are copied before the next request begins, where that is serial.
const COPY_BYTES_PER_S: f64 = 25e9;
/// Weight of the latest step in the moving average.
const EWMA_WEIGHT: f64 = 0.3;

/// How a step is shared among the tiers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// The router with all its rules.
    Kvbraid,
    /// One claim per completion, whole chunks, no duplicates.
    Window,
    /// A fixed number of chunks for each tier, by calibrated rate; the fastest tier's share is this
    /// many times its part of the sum.
    Static(f64),
    /// The same by an exponentially weighted average of each tier's rate in the steps before, which
    /// this policy is told without error.
    Ewma,
    /// The fastest tier alone.
    FastOnly,
    /// The fastest tier alone, request by request, each copied before the next is read.
    Serial,
}

/// A policy at work on one machine.
pub(super) struct Sharing<'a> {
    policy: Policy,
    config: PoolConfig,
    calibrated: &'a [f64],
    /// By tier, the moving average of its rate.
    average: Vec<f64>,
}

impl Policy {
    /// Its name in every table and file; all fixed splits share one.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kvbraid => "kvbraid",
            Self::Window => "window",
            Self::Static(_) => "static_best",
            Self::Ewma => "ewma",
            Self::FastOnly => "fast_only",
            Self::Serial => "serial",
        }
    }
}

impl<'a> Sharing<'a> {
    pub(super) fn new(policy: Policy, profile: &Profile, calibrated: &'a [f64]) -> Self {
        let mut config = PoolConfig::new(u8::try_from(profile.tiers.len()).unwrap_or(u8::MAX));
        for (window, tier) in config.windows.iter_mut().zip(&profile.tiers) {
            *window = tier.window;
        }
        if policy != Policy::Kvbraid {
            config.tail = Tail::Whole;
        }
        Self { policy, config, calibrated, average: calibrated.to_vec() }
    }

    /// Reads one step; gives the bytes that duplicates were claimed for.
    pub(super) fn step(&mut self, machine: &mut Machine, case: &Case) -> u64 {
        let from_s = machine.now_s;
        let all = TierMask::all(self.config.tiers);
        let chunks = match self.policy {
            Policy::Kvbraid | Policy::Window => case.step(|_| all),
            Policy::FastOnly => case.step(|_| TierMask::only(self.config.fastest)),
            Policy::Static(factor) => {
                let shares = skewed(&shares(self.calibrated), factor);
                case.step(|place| tier_at(&shares, place))
            }
            Policy::Ewma => {
                let shares = shares(&self.average);
                case.step(|place| tier_at(&shares, place))
            }
            Policy::Serial => {
                self.serial(machine, case);
                return 0;
            }
        };
        let report = machine.run(&chunks, &self.config);
        for ((average, rate), drift) in
            self.average.iter_mut().zip(self.calibrated).zip(machine.drift_since(from_s))
        {
            *average += EWMA_WEIGHT * (rate * drift - *average);
        }
        report.duplicate_bytes()
    }

    fn serial(&self, machine: &mut Machine, case: &Case) {
        let chunks = case.step(|_| TierMask::only(self.config.fastest));
        let end = |request: usize| chunks.len() * request / REQUESTS;
        for request in 0..REQUESTS {
            let chunks = &chunks[end(request)..end(request + 1)];
            let _ = machine.run(chunks, &self.config);
            machine.wait(chunks.len() as f64 * CHUNK_BYTES as f64 / COPY_BYTES_PER_S);
        }
    }
}

impl Case {
    /// The chunks of a step, rank by rank; `tiers` is asked for each with its place among its rank's
    /// chunks, from 0 to 1.
    fn step(&self, tiers: impl Fn(f64) -> TierMask) -> Vec<ChunkSpec> {
        let of_rank = |rank: u16| {
            let (n, ranks, at) = (self.chunks, usize::from(self.ranks), usize::from(rank));
            let here = n / ranks + usize::from(at < n % ranks);
            let tiers = &tiers;
            (0..here).map(move |i| ChunkSpec {
                tiers: tiers((i as f64 + 0.5) / here as f64),
                blocks: CHUNK_BLOCKS,
                bytes: CHUNK_BYTES,
                rank,
            })
        };
        (0..self.ranks).flat_map(of_rank).collect()
    }
}

fn shares(rates: &[f64]) -> Vec<f64> {
    let sum: f64 = rates.iter().sum();
    rates.iter().map(|rate| rate / sum).collect()
}

/// The first share `factor` times as large, the others smaller in proportion.
fn skewed(shares: &[f64], factor: f64) -> Vec<f64> {
    let Some((&first, rest)) = shares.split_first() else { return Vec::new() };
    let new = (first * factor).min(1.0);
    let others = rest.iter().map(|share| share * (1.0 - new) / (1.0 - first));
    std::iter::once(new).chain(others).collect()
}

/// Which tier reads what lies at this place, if each reads one run.
fn tier_at(shares: &[f64], place: f64) -> TierMask {
    let mut end = 0.0;
    let mut tier = 0;
    for (i, share) in shares.iter().enumerate() {
        (tier, end) = (i, end + share);
        if place < end {
            break;
        }
    }
    TierMask::from_bits(1 << tier)
}
