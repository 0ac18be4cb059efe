//! `cargo xtask bench staging`: what staging policies save, and what their protection costs.
//!
//! The runs are `kv-cxl`'s example `staging`; here they are started, and for `--real` the machine is prepared.

mod real;

pub(super) use self::real::bench as real;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{directory, save};
use crate::run;

/// Options of `staging`.
#[derive(clap::Args)]
#[group(id = "staging")]
pub(super) struct Options {
    /// Of staging --model: seeds of each scenario; what is judged has at least 30.
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(1..))]
    seeds: Option<u32>,
    /// For `staging`: on a throttled file behind the page cache, in a memory cgroup that is made for it; takes root.
    #[arg(long, requires = "name", conflicts_with_all = ["model", "devices"])]
    pub(super) real: bool,
}

/// In virtual time; writes `staging-model.json`, and `json` if given.
pub(super) fn model(options: &Options, json: Option<&Path>) -> Result<()> {
    let raw = raw("staging-model")?;
    let mut command = Command::new(build()?);
    command.arg("model").arg("--json").arg(&raw);
    if let Some(seeds) = options.seeds {
        command.args(["--seeds", &seeds.to_string()]);
    }
    run::shown(&mut command)?;
    keep("staging-model", &raw, json)
}

/// Where the example writes.
fn raw(name: &str) -> Result<PathBuf> {
    let home = directory().join("staging");
    fs::create_dir_all(&home).with_context(|| format!("create {}", home.display()))?;
    let path = home.join(format!("{name}.raw.json"));
    // What an earlier run left is not this one's.
    let _ = fs::remove_file(&path);
    Ok(path)
}

/// Adds what it ran on.
fn keep(name: &str, raw: &Path, json: Option<&Path>) -> Result<()> {
    let text = fs::read_to_string(raw).with_context(|| format!("read {}", raw.display()))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("parse {}", raw.display()))?;
    save(name, value, json)?;
    println!("\nEvery row is in {}", directory().join(format!("{name}.json")).display());
    Ok(())
}

fn build() -> Result<PathBuf> {
    let mut command = run::cargo();
    command.args(["build", "--release", "--locked", "--package", "kv-cxl", "--example", "staging"]);
    let finished = run::logged("build staging", &mut command)?;
    ensure!(finished.success, "kv-cxl's example staging does not build");
    let target =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    Ok(run::root().join(target).join("release/examples/staging"))
}
