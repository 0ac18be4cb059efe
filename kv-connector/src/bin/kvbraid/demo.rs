//! `kvbraid demo`: every policy on the same trace, on two tiers of files.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use kv_connector::{
    ByteSize, Config, ThrottleSection, TierConfig,
    replay::{CompareOptions, Comparison, compare},
};

use crate::{
    args::{Defaults, TraceArgs},
    failure::Failure,
    output,
    replay::show,
    watch::Bar,
};

/// The paced tiers: 3:1, together slower than the disk of a small virtual machine that does other things, too.
const FAST_BYTES_PER_S: u64 = 180_000_000;
const SLOW_BYTES_PER_S: u64 = FAST_BYTES_PER_S / 3;
/// Two tiers of this size are all the disk that the demo uses.
const TIER_CAPACITY: ByteSize = ByteSize::mib(1536);

/// Every policy on the same trace, on two tiers of files.
#[derive(Args)]
pub(crate) struct Demo {
    #[command(flatten)]
    trace: TraceArgs,
    /// A real directory as a tier, at its own speed; give it once for each tier. Default: two directories, paced 3:1.
    #[arg(long = "tier", value_name = "NAME=PATH")]
    tiers: Vec<String>,
    /// Where the paced tiers keep their files.
    #[arg(long, value_name = "PATH", default_value = "kvbraid-demo", overrides_with = "dir")]
    dir: PathBuf,
}

impl Demo {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let defaults = Defaults {
            requests: 180,
            // Scaled to the paces: a model of 192 KiB a token would have chunks of 96 MiB.
            chunk_bytes: ByteSize::kib(96),
            // The slice holds one request in twelve of the trace: its minute is a busy server's five seconds.
            step_ms: 60_000,
            forward_tokens_per_s: 320_000.0,
        };
        let workload = self.trace.workload(&defaults)?;
        let mut options = CompareOptions::default();
        options.forward = self.trace.forward(&defaults)?;
        options.forward.drain = Duration::from_secs(10);
        options.measure = ByteSize::mib(48);
        let config = self.config(ByteSize(workload.chunk_bytes() as u64))?;
        let steps = Comparison::runs(&options) * workload.steps() + config.tiers.len();
        let bar = Bar::new(steps);
        let comparison = compare(&config, &workload, &options, &bar);
        bar.done();
        // Only if it is empty: what is in it by now is not ours.
        let _ = fs::remove_dir(self.dir.join("fast"))
            .and_then(|()| fs::remove_dir(self.dir.join("slow")));
        let _ = fs::remove_dir(&self.dir);
        show(&comparison?, &workload, &self.trace)?;
        match (&self.tiers[..], shared_device(&config)) {
            // The paced tiers are slower than the disk that they share.
            ([], _) | (_, None) => Ok(()),
            (_, Some((one, other))) => output::print(&format!(
                "note: {one} and {other} lie on one device: they share its bandwidth and cannot add up\n"
            )),
        }
    }

    fn config(&self, chunk_bytes: ByteSize) -> Result<Config, Failure> {
        let mut config = Config::new(match self.tiers.as_slice() {
            [] => vec![
                paced("fast", &self.dir, FAST_BYTES_PER_S, 12),
                paced("slow", &self.dir, SLOW_BYTES_PER_S, 4),
            ],
            named => named.iter().map(|tier| real(tier)).collect::<Result<_, _>>()?,
        });
        config.engine.chunk_bytes_max = chunk_bytes;
        config.engine.staging = ByteSize::mib(96);
        // A few chunks: what a step leaves behind is mostly gone before it is wanted again.
        config.engine.host_cache = ByteSize::mib(16);
        config.check()?;
        Ok(config)
    }
}

/// Two tiers whose directories lie on one device.
fn shared_device(config: &Config) -> Option<(&str, &str)> {
    let mut seen: Vec<(u64, &str)> = Vec::new();
    for tier in &config.tiers {
        let Ok(metadata) = fs::metadata(tier.path.as_ref()?) else { continue };
        if let Some((_, other)) = seen.iter().find(|(device, _)| *device == metadata.dev()) {
            return Some((other, &tier.name));
        }
        seen.push((metadata.dev(), &tier.name));
    }
    None
}

fn paced(name: &str, directory: &Path, bytes_per_s: u64, window: u32) -> TierConfig {
    let mut tier = TierConfig::nvme(name, directory.join(name), TIER_CAPACITY);
    tier.window = Some(window);
    tier.throttle = Some(ThrottleSection::new(ByteSize(bytes_per_s)));
    tier
}

fn real(text: &str) -> Result<TierConfig, Failure> {
    let parts = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty());
    let Some((name, path)) = parts else {
        let line =
            format!("--tier: `{text}` names no tier; give NAME=PATH, such as nvme=/mnt/nvme/demo");
        return Err(Failure::usage(line));
    };
    Ok(TierConfig::nvme(name, path, TIER_CAPACITY))
}
