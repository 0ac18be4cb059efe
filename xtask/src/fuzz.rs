//! `cargo xtask fuzz`: the parsers of `kv-chunk` on mutated bytes, for a bounded time.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use crate::run;

const PACKAGE: &str = "kv-chunk/fuzz";

/// LLVM's coverage instrumentation, which stable Rust has; a sanitizer would need nightly.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// Arguments of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Fuzz {
    /// How long each target runs.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
}

impl Fuzz {
    pub(crate) fn run(self) -> Result<()> {
        let host = host()?;
        let built = run::logged(
            "fuzz build",
            run::cargo()
                .args(["build", "--locked", "--release", "--target", &host, "--manifest-path"])
                .arg(format!("{PACKAGE}/Cargo.toml"))
                .env("RUSTFLAGS", COVERAGE),
        )?;
        ensure!(
            built.success,
            "the fuzz targets do not build (libFuzzer also needs a C++ compiler)"
        );
        let release = run::root().join(PACKAGE).join("target").join(&host).join("release");
        for target in targets()? {
            self.explore(&release.join(&target), &target)?;
        }
        Ok(())
    }

    fn explore(&self, program: &Path, target: &str) -> Result<()> {
        println!("fuzz: {target} for {} s", self.seconds);
        // Inputs that make it fail are kept here, and named in its output.
        let findings = run::root().join("target/fuzz").join(target);
        fs::create_dir_all(&findings).with_context(|| format!("create {}", findings.display()))?;
        let finished = run::logged(
            &format!("fuzz {target}"),
            Command::new(program)
                .arg(format!("-max_total_time={}", self.seconds))
                .arg("-max_len=8192")
                .arg(format!("-artifact_prefix={}/", findings.display())),
        )?;
        ensure!(
            finished.success,
            "{target} failed on an input that is now in {}",
            findings.display()
        );
        let done =
            finished.log.lines().rev().find(|line| line.starts_with("Done ")).unwrap_or("done");
        println!("fuzz: {target}: {done}, no finding");
        Ok(())
    }
}

/// The triple of this machine; naming it keeps the instrumentation off build scripts.
fn host() -> Result<String> {
    let output = run::cargo()
        .args(["--version", "--verbose"])
        .output()
        .context("ask cargo for its version")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("cargo does not say its host")?.to_owned())
}

/// Names of the files in `fuzz_targets`.
fn targets() -> Result<Vec<String>> {
    let directory = run::root().join(PACKAGE).join("fuzz_targets");
    let mut names = Vec::new();
    for entry in
        fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?
    {
        names.extend(entry?.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    names.sort();
    ensure!(!names.is_empty(), "{} has no targets", directory.display());
    Ok(names)
}
