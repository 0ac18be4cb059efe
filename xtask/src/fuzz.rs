//! `cargo xtask fuzz`: the parsers of `kv-chunk` on mutated bytes, for a bounded time.

use anyhow::Result;

/// Arguments of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Fuzz {
    /// How long each target runs.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
}

impl Fuzz {
    pub(crate) fn run(self) -> Result<()> {
        anyhow::bail!("kv-chunk/fuzz has no targets yet (asked for {} s)", self.seconds)
    }
}
