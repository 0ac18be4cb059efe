//! The wheel: built as it is shipped, installed into an environment of its own, used by hostile hands.

use std::{path::Path, process::Command};

use anyhow::{Result, bail, ensure};

use super::{Report, home};
use crate::{
    engines::install,
    run,
    tally::Tally,
    wheel::{build, environment, tools},
};

pub(super) fn run(report: &mut Report) -> Result<()> {
    let tools = match tools() {
        Ok(tools) => tools,
        Err(error) => {
            report.skip("wheel", &format!("its tools cannot be installed: {error:#}"));
            return Ok(());
        }
    };
    let clippy = ["clippy", "--locked", "-p", "kv-connector", "--features", "python", "--lib"];
    let mut command = run::cargo();
    command.args(clippy).args(["--", "-D", "warnings"]);
    ensure!(run::logged("e2e wheel clippy", &mut command)?.success, "clippy complains");
    let wheel = build(&tools)?;
    let home = home("wheel")?.join("venv");
    environment(&home, &[])?;
    install(&home, &wheel)?;
    python_tests(report, &home, "check_wheel.py", &[])?;
    python_tests(report, &home, "check_steps.py", &[])?;
    python_tests(report, &home, "check_claims.py", &[])
}

/// Runs one script of `kv-connector/python/tests` and counts what it reports.
pub(super) fn python_tests(
    report: &mut Report,
    environment: &Path,
    script: &str,
    variables: &[(&str, String)],
) -> Result<()> {
    let mut command = Command::new(environment.join("bin/python"));
    command.arg(run::root().join("kv-connector/python/tests").join(script));
    // Nothing is written beside the scripts.
    command.current_dir(environment).env("PYTHONDONTWRITEBYTECODE", "1");
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let finished = run::logged(&format!("e2e {script}"), &mut command)?;
    let tally = Tally::read(&finished.log);
    if tally.passed + tally.failed == 0 || (!finished.success && tally.failed == 0) {
        bail!("{script} did not run to its end");
    }
    let (passed, failed, skipped) = (tally.passed, tally.failed, tally.skips.len());
    println!("{script}: {passed} passed, {failed} failed, {skipped} skipped");
    report.count(&tally, script);
    Ok(())
}
