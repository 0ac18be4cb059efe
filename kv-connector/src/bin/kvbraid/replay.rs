//! `kvbraid replay`: a trace against the user's own configuration.

use std::path::PathBuf;

use clap::Args;
use kv_connector::{
    Config,
    replay::{CompareOptions, Comparison, Policy, RunOptions, compare, run},
};

use crate::{
    args::{Defaults, TraceArgs},
    failure::Failure,
    output,
    watch::Bar,
};

/// A trace against the user's own configuration.
#[derive(Args)]
pub(crate) struct Replay {
    /// Engine configuration, TOML or JSON. Its directories are used for fresh subdirectories only.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    trace: TraceArgs,
    /// serial, fast_only, kvbraid, or static: and a share for each tier, such as static:0.75,0.25.
    #[arg(long, value_name = "POLICY", default_value = "kvbraid")]
    policy: Policy,
    /// Run every policy, one after another, and show them side by side.
    #[arg(long, conflicts_with_all = ["policy", "speed"])]
    compare: bool,
    /// Keep the trace's arrival times, this many times faster; by default steps run back to back.
    #[arg(long, value_name = "X")]
    speed: Option<f64>,
}

impl Replay {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let config = Config::from_file(&self.config)?;
        let defaults = Defaults {
            requests: usize::MAX,
            chunk_bytes: config.engine.chunk_bytes_max,
            step_ms: 3000,
            forward_tokens_per_s: 100_000.0,
        };
        let workload = self.trace.workload(&defaults)?;
        let forward = self.trace.forward(&defaults)?;
        if workload.chunk_bytes() as u64 > config.engine.chunk_bytes_max.0 {
            let line =
                "--chunk-bytes: larger than chunk_bytes_max; raise that or give smaller chunks";
            return Err(Failure::usage(line));
        }
        if self.compare {
            let mut options = CompareOptions::default();
            options.forward = forward;
            let steps = Comparison::runs(&options) * workload.steps() + config.tiers.len();
            let bar = Bar::new(steps);
            let comparison = compare(&config, &workload, &options, &bar);
            bar.done();
            return show(&comparison?, &workload, &self.trace);
        }
        if let Policy::Static(shares) = &self.policy
            && shares.len() != config.tiers.len()
        {
            let (shares, tiers) = (shares.len(), config.tiers.len());
            let line =
                format!("--policy: {shares} shares for {tiers} tiers; give one for each tier");
            return Err(Failure::usage(line));
        }
        let mut options = RunOptions::new(self.policy);
        options.forward = forward;
        options.speed = self.speed;
        let bar = Bar::new(workload.steps());
        let report = run(&config, &workload, &options, &bar);
        bar.done();
        let report = report?;
        let names: Vec<&str> = config.tiers.iter().map(|tier| tier.name.as_str()).collect();
        output::print(&report.to_text(&names))?;
        if let Some(path) = &self.trace.json {
            output::save(path, &report.to_json(&names, &workload))?;
        }
        output::verdict(report.bytes_wrong, report.problems.values().sum())
    }
}

/// Prints and saves a comparison; fails if any byte was wrong or anything failed.
pub(crate) fn show(
    comparison: &Comparison,
    workload: &kv_connector::replay::Workload,
    trace: &TraceArgs,
) -> Result<(), Failure> {
    output::print(&comparison.to_table(workload))?;
    if let Some(path) = &trace.json {
        output::save(path, &comparison.to_json(workload))?;
    }
    let reports = || comparison.rows.iter().chain([&comparison.uninterrupted]);
    let wrong = reports().map(|report| report.bytes_wrong).sum();
    output::verdict(wrong, reports().flat_map(|report| report.problems.values()).sum())
}
