//! `cargo xtask e2e [NAME]`: suites that need installs, root or time, each with a set-up of its own.
//!
//! A suite sets something up, then runs ordinary test programs of the crates in it; environment variables tell them
//! where. Everything is started on loopback and taken down at the end. What a machine cannot do is a skip with a reason.

mod capacity;
mod dax;
mod faults;
mod filesystems;
mod guard;
mod lmcache;
mod seaweed;
mod seccomp;
mod sglang;
mod vllm;
mod wheel;

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result, bail};

use crate::{run, tally::Tally};

/// Arguments of `cargo xtask e2e`.
#[derive(clap::Args)]
pub(crate) struct E2e {
    /// Only this suite: `capacity`, `dax`, `faults`, `filesystems`, `lmcache`, `seaweed`, `seccomp`, `sglang`, `vllm` or
    /// `wheel`.
    name: Option<String>,
    /// As many seeded runs, kills and writes as a release needs, not the tenth that a change needs.
    #[arg(long)]
    full: bool,
}

type Suite = fn(&mut Report) -> Result<()>;

const SUITES: &[(&str, Suite)] = &[
    ("capacity", capacity::run),
    ("dax", dax::run),
    ("faults", faults::run),
    ("filesystems", filesystems::run),
    ("lmcache", lmcache::run),
    ("seaweed", seaweed::run),
    ("seccomp", seccomp::run),
    ("sglang", sglang::run),
    ("vllm", vllm::run),
    ("wheel", wheel::run),
];

impl E2e {
    pub(crate) fn run(self) -> Result<()> {
        let wanted = |name: &str| self.name.as_deref().is_none_or(|only| only == name);
        let suites: Vec<_> = SUITES.iter().filter(|(name, _)| wanted(name)).collect();
        if suites.is_empty() {
            let names: Vec<_> = SUITES.iter().map(|(name, _)| *name).collect();
            bail!("no such suite; there are {}", names.join(", "));
        }
        let mut report = Report { full: self.full, ..Report::default() };
        for (name, suite) in suites {
            println!("== {name}");
            let begun = Instant::now();
            if let Err(error) = suite(&mut report) {
                report.fail(name, &format!("{error:#}"));
            }
            println!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
        }
        println!();
        report.tally.finish();
        Ok(())
    }
}

/// What ran so far.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// As much as a release needs.
    full: bool,
    tally: Tally,
}

impl Report {
    /// Something that could not be tried here.
    pub(crate) fn skip(&mut self, what: &str, why: &str) {
        self.tally.skips.push(format!("{what}: {why}"));
    }

    pub(crate) fn fail(&mut self, what: &str, why: &str) {
        self.tally.failed += 1;
        self.tally.failures.push(format!("{what}: {why}"));
    }

    /// Runs one test program of one crate with these variables; `filter` names tests, none for all. What it said is
    /// counted here and given back.
    pub(crate) fn tests(
        &mut self,
        name: &str,
        program: (&str, &str),
        filter: &[&str],
        variables: &[(&str, String)],
    ) -> Result<Tally> {
        let (package, target) = program;
        let mut command = run::cargo();
        command.args([
            "test",
            "--locked",
            "--package",
            package,
            "--test",
            target,
            "--no-fail-fast",
            "--",
        ]);
        command.arg("--show-output").args(filter);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let finished = run::logged(&format!("e2e {name}"), &mut command)?;
        let tally = Tally::read(&finished.log);
        if !finished.success && tally.failed == 0 {
            bail!("{package}'s {target} does not build, or was killed");
        }
        if tally.passed + tally.failed == 0 {
            bail!("{package}'s {target} has no test {filter:?}");
        }
        println!(
            "{name}: {} passed, {} failed, {} skipped",
            tally.passed,
            tally.failed,
            tally.skips.len()
        );
        // What tests measured.
        for figure in finished.log.lines().filter_map(|line| line.strip_prefix("FIGURE ")) {
            println!("  {figure}");
        }
        self.count(&tally, name);
        Ok(tally)
    }

    /// A test that skipped did not pass.
    fn count(&mut self, tally: &Tally, name: &str) {
        let skipped = tally.skips.len() as u64;
        self.tally.passed += tally.passed.saturating_sub(skipped);
        self.tally.failed += tally.failed;
        let at = |text: &String| format!("{name}: {text}");
        self.tally.failures.extend(tally.failures.iter().map(at));
        self.tally.skips.extend(tally.skips.iter().map(at));
    }
}

/// Where a suite works; made if absent.
fn home(suite: &str) -> Result<PathBuf> {
    let home = run::root().join("target/e2e").join(suite);
    std::fs::create_dir_all(&home).with_context(|| format!("create {}", home.display()))?;
    Ok(home.canonicalize()?)
}
