//! What `replay` and `demo` have in common: a trace and how it is cut into steps.

use std::path::PathBuf;

use clap::Args;
use kv_connector::{
    ByteSize,
    replay::{Forward, ScheduleOptions, Trace, TraceLimits, Workload},
};

use crate::failure::Failure;

/// A trace and how it is served.
#[derive(Args)]
pub(crate) struct TraceArgs {
    /// Request trace in Mooncake's JSON lines, plain or gzip.
    #[arg(long, value_name = "FILE", overrides_with = "trace")]
    pub(crate) trace: PathBuf,
    /// Replay the first N requests only.
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Payload of a chunk (512 tokens), such as "2 MiB".
    #[arg(long, value_name = "SIZE")]
    chunk_bytes: Option<ByteSize>,
    /// Arrivals of one such stretch of trace time are served in one scheduler step.
    #[arg(long, value_name = "MS")]
    step_ms: Option<u64>,
    /// Most requests in a step.
    #[arg(long, value_name = "N")]
    step_requests: Option<usize>,
    /// Seed of the arrivals within a tick (3 s) of the trace's clock.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Speed of the modelled forward pass, in prompt tokens a second; 0 for no forward pass.
    #[arg(long, value_name = "N")]
    forward_tokens_per_s: Option<f64>,
    /// Write the results as JSON, too.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Values for what the caller leaves open.
pub(crate) struct Defaults {
    pub(crate) requests: usize,
    pub(crate) chunk_bytes: ByteSize,
    pub(crate) step_ms: u64,
    pub(crate) forward_tokens_per_s: f64,
}

impl TraceArgs {
    /// Loads the trace and cuts it into steps.
    pub(crate) fn workload(&self, defaults: &Defaults) -> Result<Workload, Failure> {
        let mut limits = TraceLimits::default();
        limits.requests_max = self.requests.unwrap_or(defaults.requests);
        let trace =
            Trace::load(&self.trace, limits).map_err(kv_connector::replay::ReplayError::from)?;
        let mut options = ScheduleOptions::default();
        options.step_ms = self.step_ms.unwrap_or(defaults.step_ms);
        options.requests_max = self.step_requests.unwrap_or(options.requests_max);
        options.seed = self.seed;
        let bytes = self.chunk_bytes.unwrap_or(defaults.chunk_bytes).0;
        Ok(Workload::new(trace, options, usize::try_from(bytes).unwrap_or(usize::MAX))?)
    }

    /// The modelled forward pass.
    pub(crate) fn forward(&self, defaults: &Defaults) -> Result<Forward, Failure> {
        let given = self.forward_tokens_per_s.unwrap_or(defaults.forward_tokens_per_s);
        if !(0.0..f64::INFINITY).contains(&given) {
            let line =
                format!("--forward-tokens-per-s: {given} is no speed; give a positive number or 0");
            return Err(Failure::usage(line));
        }
        let mut forward = Forward::default();
        forward.tokens_per_s = if given == 0.0 { f64::INFINITY } else { given };
        Ok(forward)
    }
}
