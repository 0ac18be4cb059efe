//! `cargo xtask loom`: the loom tests of every crate that has any, in a target directory of their own.

use std::env;

use anyhow::{Result, ensure};

use crate::{metadata, run, tally::Tally};

/// Enough for every bug that one thread can cause by being stopped at the worst moment, thrice.
const MAX_PREEMPTIONS: &str = "3";

/// Arguments of `cargo xtask loom`.
#[derive(clap::Args)]
pub(crate) struct Loom {
    /// Only this crate.
    #[arg(short, long)]
    package: Option<String>,
}

impl Loom {
    pub(crate) fn run(self) -> Result<()> {
        let mut crates = metadata::dependents(metadata::packages()?, "loom");
        crates.retain(|name| self.package.as_ref().is_none_or(|wanted| wanted == name));
        let tally = explore(&crates)?;
        for name in &crates {
            println!("{name}: {} loom tests passed", count(&tally, name));
        }
        let (passed, failed) = (tally.passed, tally.failed);
        println!("{passed} passed, {failed} failed (at most {} preemptions)", preemptions());
        ensure!(failed == 0, "loom found a bad interleaving");
        Ok(())
    }
}

/// The preemption bound: `LOOM_MAX_PREEMPTIONS`, or ours.
pub(crate) fn preemptions() -> String {
    env::var("LOOM_MAX_PREEMPTIONS").unwrap_or_else(|_| MAX_PREEMPTIONS.to_owned())
}

/// How many tests of `package` passed.
pub(crate) fn count(tally: &Tally, package: &str) -> usize {
    let program = format!("{} ", package.replace('-', "_"));
    tally.names.iter().filter(|name| name.starts_with(&program)).count()
}

/// Runs the loom tests of these crates.
///
/// # Errors
/// If they do not build, or if one has none: a crate that depends on loom and tests nothing with it lost its tests.
pub(crate) fn explore(packages: &[String]) -> Result<Tally> {
    ensure!(!packages.is_empty(), "no such crate depends on loom");
    println!("loom: {}, at most {} preemptions", packages.join(", "), preemptions());
    let mut command = run::cargo();
    // --cfg loom changes every dependency, hence the directory.
    command.args([
        "test",
        "--locked",
        "--no-fail-fast",
        "--profile=loom",
        "--lib",
        "--target-dir=target/loom",
    ]);
    command.args(packages.iter().map(|name| format!("--package={name}")));
    command.args(["loom", "--", "--show-output"]);
    command.env("RUSTFLAGS", "--cfg loom").env("LOOM_MAX_PREEMPTIONS", preemptions());
    let finished = run::logged("loom", &mut command)?;
    let tally = Tally::read(&finished.log);
    ensure!(finished.success || tally.failed > 0, "the loom tests do not build, or one was killed");
    for name in packages {
        let none = tally.failed == 0 && count(&tally, name) == 0;
        ensure!(!none, "{name} depends on loom but has no loom tests");
    }
    Ok(tally)
}
