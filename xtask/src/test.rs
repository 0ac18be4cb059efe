//! `cargo xtask test`: everything that must hold before a change lands, with nothing but a Rust toolchain.

use std::{process::Command, time::Instant};

use anyhow::{Result, ensure};

use crate::{loom, metadata, package, run, shuttle, tally::Tally, tidy};

/// Arguments of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Test {
    /// Only steps whose name contains this, such as `tidy`, `clippy kv-router` or `loom`.
    #[arg(long)]
    only: Option<String>,
}

impl Test {
    pub(crate) fn run(self) -> Result<()> {
        let mut report = Report { only: self.only, rows: Vec::new(), tally: Tally::default() };
        let packages = metadata::packages()?;
        report.check("fmt", || {
            let fuzz = ["fmt", "--manifest-path=kv-chunk/fuzz/Cargo.toml", "--check"];
            Ok(plain("fmt", &["fmt", "--all", "--check"])? && plain("fmt fuzz", &fuzz)?)
        })?;
        report.check("tidy", || tidy::run().map(|()| true).or_else(say))?;
        for package in &packages {
            // One crate at a time, so that each must build with the features that it asks for itself.
            let name = format!("clippy {}", package.name);
            let clippy = [
                "clippy",
                "--locked",
                "--package",
                &package.name,
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ];
            report.check(&name, || plain(&name, &clippy))?;
        }
        report.tests("tests", workspace_tests)?;
        report.conformance();
        report.check("docs", || {
            let doc = ["doc", "--locked", "--workspace", "--no-deps"];
            succeeds("docs", run::cargo().args(doc).env("RUSTDOCFLAGS", "-D warnings"))
        })?;
        report.check("package", || package::check(&packages))?;
        let randomized = metadata::dependents(metadata::packages()?, "shuttle");
        report.tests("shuttle", || shuttle::explore(&randomized))?;
        let modelled = metadata::dependents(packages, "loom");
        report.tests("loom", || loom::explore(&modelled))?;
        report.finish()
    }
}

fn plain(name: &str, arguments: &[&str]) -> Result<bool> {
    succeeds(name, run::cargo().args(arguments))
}

fn succeeds(name: &str, command: &mut Command) -> Result<bool> {
    Ok(run::logged(name, command)?.success)
}

fn say(error: anyhow::Error) -> Result<bool> {
    println!("{error:#}");
    Ok(false)
}

/// Unit, integration and doc tests of all crates.
fn workspace_tests() -> Result<Tally> {
    let mut command = run::cargo();
    command.args(["test", "--locked", "--workspace", "--no-fail-fast", "--", "--show-output"]);
    let finished = run::logged("tests", &mut command)?;
    let tally = Tally::read(&finished.log);
    ensure!(finished.success || tally.failed > 0, "the tests do not build, or one was killed");
    Ok(tally)
}

struct Row {
    name: String,
    seconds: f64,
    good: bool,
    note: String,
}

/// What ran so far.
struct Report {
    only: Option<String>,
    rows: Vec<Row>,
    tally: Tally,
}

impl Report {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// A step that either holds or not; it counts as one test.
    fn check(&mut self, name: &str, step: impl FnOnce() -> Result<bool>) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        println!("== {name}");
        let begun = Instant::now();
        let good = step()?;
        self.tally.passed += u64::from(good);
        self.tally.failed += u64::from(!good);
        self.row(name, begun, good, String::new());
        Ok(())
    }

    /// A step that runs tests. One that cannot even run them counts as one failure, and the rest goes on.
    fn tests(&mut self, name: &str, step: impl FnOnce() -> Result<Tally>) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        println!("== {name}");
        let begun = Instant::now();
        match step() {
            Ok(tally) => {
                let mut note = format!("{} passed", tally.passed);
                if tally.failed > 0 {
                    note += &format!(", {} failed", tally.failed);
                }
                match name {
                    "loom" => note += &format!(", at most {} preemptions", loom::preemptions()),
                    "shuttle" => note += &format!(", {} schedules a step", shuttle::iterations()),
                    _ => {}
                }
                self.row(name, begun, tally.failed == 0, note);
                self.tally += tally;
            }
            Err(error) => {
                self.tally.failed += 1;
                self.row(name, begun, false, format!("{error:#}"));
            }
        }
        Ok(())
    }

    /// The conformance suite runs among the tests of the crates; here it only must not have vanished.
    fn conformance(&mut self) {
        let count = self.tally.named("conform");
        let looked = self.only.is_none();
        if looked {
            self.tally.failed += u64::from(count == 0);
            self.row(
                "conformance",
                Instant::now(),
                count > 0,
                format!("{count} of the tests above"),
            );
        }
    }

    fn row(&mut self, name: &str, begun: Instant, good: bool, note: String) {
        self.rows.push(Row {
            name: name.to_owned(),
            seconds: begun.elapsed().as_secs_f64(),
            good,
            note,
        });
    }

    fn finish(self) -> Result<()> {
        println!("\n{:<22} {:>8}  result", "step", "seconds");
        for row in &self.rows {
            let result = if row.good { "ok" } else { "FAILED" };
            println!("{:<22} {:>8.1}  {result:<6}  {}", row.name, row.seconds, row.note);
        }
        let seconds: f64 = self.rows.iter().map(|row| row.seconds).sum();
        println!("{:<22} {seconds:>8.1}\n", "all");
        self.tally.finish();
        ensure!(self.tally.passed > 0, "nothing ran");
        Ok(())
    }
}
