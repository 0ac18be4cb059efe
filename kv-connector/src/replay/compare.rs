//! The same trace served by every policy, side by side.

use crate::{
    ByteSize, Config, TierId,
    replay::{
        Forward, Policy, ReplayError, RunOptions, RunReport, Watch, Workload, alone,
        run::{Restart, run},
    },
};

/// How policies are compared.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompareOptions {
    /// The modelled forward pass, the same for all.
    pub forward: Forward,
    /// What each tier reads alone for its rate.
    pub measure: ByteSize,
    /// The grid of static splits: the fastest tier's share, relative to its share of the rates measured alone.
    pub share_offsets: Vec<f64>,
}

impl Default for CompareOptions {
    /// 256 MiB for each rate; the share that the rates suggest, and 5 points to either side of it.
    fn default() -> Self {
        Self {
            forward: Forward::default(),
            measure: ByteSize::mib(256),
            share_offsets: vec![-0.05, 0.0, 0.05],
        }
    }
}

/// What a comparison measured.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Comparison {
    /// `serial`, `fast_only`, `static_best`, `kvbraid`; the last with the engine restarted half-way.
    pub rows: Vec<RunReport>,
    /// KVBraid's policy without the restart.
    pub uninterrupted: RunReport,
    /// Every static split that was tried: its shares and retrieval time in seconds.
    pub grid: Vec<(Vec<f64>, f64)>,
    /// Each tier's rate alone, in bytes/s.
    pub alone_bytes_per_s: Vec<f64>,
    /// Names of the tiers.
    pub tiers: Vec<String>,
    /// The pace that each tier is held to, in bytes/s; `None` runs at its own speed.
    pub paced_bytes_per_s: Vec<Option<u64>>,
}

impl Comparison {
    /// Whether every byte of every run was right and nothing failed.
    pub fn is_clean(&self) -> bool {
        self.rows.iter().chain([&self.uninterrupted]).all(RunReport::is_clean)
    }

    /// How many runs a comparison takes with these options.
    pub fn runs(options: &CompareOptions) -> usize {
        4 + options.share_offsets.len()
    }
}

/// Serves `workload` by every policy, each with a fresh engine in fresh directories.
pub fn compare(
    config: &Config,
    workload: &Workload,
    options: &CompareOptions,
    watch: &dyn Watch,
) -> Result<Comparison, ReplayError> {
    watch.phase("rates alone");
    let alone_bytes_per_s = alone::rates(config, workload, options.measure, watch)?;
    let fastest = fastest(&alone_bytes_per_s);
    let serve = |policy: Policy, restart| {
        watch.phase(policy.name());
        let mut run_options = RunOptions::new(policy);
        run_options.fastest = fastest;
        run_options.forward = options.forward;
        run_options.restart = restart;
        run(config, workload, &run_options, watch)
    };
    let serial = serve(Policy::Serial, Restart::Never)?;
    let fast_only = serve(Policy::FastOnly, Restart::Never)?;
    let mut static_best: Option<RunReport> = None;
    let mut grid = Vec::new();
    for offset in &options.share_offsets {
        let shares = shares(&alone_bytes_per_s, fastest, *offset);
        let report = serve(Policy::Static(shares.clone()), Restart::Never)?;
        grid.push((shares, report.retrieval_s));
        let better = |best: &RunReport| {
            (!report.is_clean(), report.retrieval_s) < (!best.is_clean(), best.retrieval_s)
        };
        if static_best.as_ref().is_none_or(better) {
            static_best = Some(report);
        }
    }
    let uninterrupted = serve(Policy::Kvbraid, Restart::Never)?;
    let restarted = serve(Policy::Kvbraid, Restart::HalfWay)?;
    let mut rows = vec![serial, fast_only];
    rows.extend(static_best);
    rows.push(restarted);
    Ok(Comparison {
        rows,
        uninterrupted,
        grid,
        alone_bytes_per_s,
        tiers: config.tiers.iter().map(|tier| tier.name.clone()).collect(),
        paced_bytes_per_s: config
            .tiers
            .iter()
            .map(|tier| tier.throttle.map(|throttle| throttle.bytes_per_s.0))
            .collect(),
    })
}

fn fastest(rates: &[f64]) -> TierId {
    let index = (0..rates.len()).max_by(|a, b| rates[*a].total_cmp(&rates[*b])).unwrap_or(0);
    TierId(u8::try_from(index).unwrap_or(0))
}

/// The fastest tier's share moved by `offset`; the others divide the rest as their rates do.
fn shares(rates: &[f64], fastest: TierId, offset: f64) -> Vec<f64> {
    let total: f64 = rates.iter().sum();
    let fastest = usize::from(fastest.0);
    let suggested = rates[fastest] / total;
    let share = if rates.len() == 1 { 1.0 } else { (suggested + offset).clamp(0.0, 1.0) };
    let rest = |rate: f64| (1.0 - share) * rate / (total - rates[fastest]);
    (0..rates.len()).map(|tier| if tier == fastest { share } else { rest(rates[tier]) }).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two tiers at 300 and 100 MB/s; KVBraid 3.6 MB in 10 ms against 13.2 ms.
    pub(crate) fn example() -> Comparison {
        let row = |policy: Policy, retrieval_s: f64, tier_bytes: [u64; 2]| {
            let mut report = RunReport::new(policy, 2);
            report.retrieval_s = retrieval_s;
            report.step_s = vec![retrieval_s / 2.0; 2];
            report.storage_bytes = tier_bytes.iter().sum();
            report.tier_bytes = tier_bytes.to_vec();
            report.bytes_verified = report.storage_bytes;
            (report.lookups, report.hits, report.cpu_s) = (12, 10, 0.0018);
            report
        };
        Comparison {
            rows: vec![
                row(Policy::Serial, 0.015, [3_600_000, 0]),
                row(Policy::FastOnly, 0.0132, [3_600_000, 0]),
                row(Policy::Static(vec![0.75, 0.25]), 0.0105, [2_700_000, 900_000]),
                row(Policy::Kvbraid, 0.010, [2_600_000, 1_000_000]),
            ],
            uninterrupted: row(Policy::Kvbraid, 0.010, [2_600_000, 1_000_000]),
            grid: vec![(vec![0.7, 0.3], 0.0112), (vec![0.75, 0.25], 0.0105)],
            alone_bytes_per_s: vec![300e6, 100e6],
            tiers: vec!["fast".to_owned(), "slow".to_owned()],
            paced_bytes_per_s: vec![Some(300_000_000), None],
        }
    }

    #[test]
    fn shares_follow_the_rates_and_add_up() {
        let near = |found: Vec<f64>, due: &[f64]| {
            assert!(found.iter().zip(due).all(|(a, b)| (a - b).abs() < 1e-9), "{found:?} {due:?}");
        };
        near(shares(&[3.0, 1.0], TierId(0), 0.0), &[0.75, 0.25]);
        near(shares(&[3.0, 1.0], TierId(0), 0.05), &[0.8, 0.2]);
        near(shares(&[2.0, 6.0, 2.0], TierId(1), -0.1), &[0.25, 0.5, 0.25]);
        near(shares(&[5.0], TierId(0), -0.05), &[1.0]);
        near(shares(&[5.0, 0.1], TierId(0), 0.5), &[1.0, 0.0]);
    }

    #[test]
    fn the_fastest_tier_is_the_one_with_the_highest_rate() {
        assert_eq!(fastest(&[1.0, 3.0, 2.0]), TierId(1));
    }
}
