//! `cargo xtask loom`: the loom tests of every crate that has any, in a target directory of their own.

use std::env;

use anyhow::{Result, ensure};

use crate::{
    metadata::{self, Package},
    run,
    tally::Tally,
};

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
        let mut crates = crates_with_loom(metadata::packages()?);
        crates.retain(|name| self.package.as_ref().is_none_or(|wanted| wanted == name));
        ensure!(!crates.is_empty(), "no such crate depends on loom");
        let mut all = Tally::default();
        for name in crates {
            all += explore(&name)?.0;
        }
        println!(
            "{} loom tests passed, {} failed (at most {} preemptions)",
            all.passed,
            all.failed,
            preemptions()
        );
        ensure!(all.failed == 0, "loom found a bad interleaving");
        Ok(())
    }
}

/// The preemption bound: `LOOM_MAX_PREEMPTIONS`, or ours.
pub(crate) fn preemptions() -> String {
    env::var("LOOM_MAX_PREEMPTIONS").unwrap_or_else(|_| MAX_PREEMPTIONS.to_owned())
}

/// Names of the crates whose sources know loom.
pub(crate) fn crates_with_loom(packages: Vec<Package>) -> Vec<String> {
    let knows_loom =
        |package: &Package| package.dependencies.iter().any(|dependency| dependency.name == "loom");
    packages.into_iter().filter(knows_loom).map(|package| package.name).collect()
}

/// Runs the loom tests of one crate; the seconds include the build.
///
/// # Errors
/// If they fail, or if there are none: a crate that depends on loom and tests nothing with it has lost its tests.
pub(crate) fn explore(package: &str) -> Result<(Tally, f64)> {
    println!("loom: {package}, at most {} preemptions", preemptions());
    // --cfg loom changes every dependency, hence the directory.
    let finished = run::logged(
        &format!("loom {package}"),
        run::cargo()
            .args([
                "test",
                "--locked",
                "--profile=loom",
                "--lib",
                "--target-dir=target/loom",
                "--package",
                package,
            ])
            .args(["loom", "--", "--show-output"])
            .env("RUSTFLAGS", "--cfg loom")
            .env("LOOM_MAX_PREEMPTIONS", preemptions()),
    )?;
    let tally = Tally::read(&finished.log);
    ensure!(
        finished.success || tally.failed > 0,
        "the loom tests of {package} do not build or were killed"
    );
    ensure!(tally.passed + tally.failed > 0, "{package} depends on loom but has no loom tests");
    Ok((tally, finished.seconds))
}
