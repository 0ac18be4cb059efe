//! The shuttle tests of every crate that has any: the operations that loom explores, at size, in random schedules.

use std::env;

use anyhow::{Result, ensure};

use crate::{loom, run, tally::Tally};

/// Schedules of each step: some seconds.
const ITERATIONS: &str = "200";

/// How many schedules of each step: `SHUTTLE_ITERATIONS`, or ours.
pub(crate) fn iterations() -> String {
    env::var("SHUTTLE_ITERATIONS").unwrap_or_else(|_| ITERATIONS.to_owned())
}

/// Runs the shuttle tests of these crates.
///
/// # Errors
/// If they do not build, or if one has none: a crate that depends on shuttle and tests nothing with it lost its tests.
pub(crate) fn explore(packages: &[String]) -> Result<Tally> {
    println!("shuttle: {}, {} schedules of each step", packages.join(", "), iterations());
    let mut command = run::cargo();
    // A feature and not a cfg: it changes the crate and none of its dependencies, which are built already.
    command.args(["test", "--locked", "--no-fail-fast", "--lib", "--features=shuttle"]);
    command.args(packages.iter().map(|name| format!("--package={name}")));
    command.args(["shuttle", "--", "--show-output"]);
    command.env("SHUTTLE_ITERATIONS", iterations());
    let finished = run::logged("shuttle", &mut command)?;
    let tally = Tally::read(&finished.log);
    ensure!(
        finished.success || tally.failed > 0,
        "the shuttle tests do not build, or one was killed"
    );
    for name in packages {
        let none = tally.failed == 0 && loom::count(&tally, name) == 0;
        ensure!(!none, "{name} depends on shuttle but has no shuttle tests");
    }
    Ok(tally)
}
