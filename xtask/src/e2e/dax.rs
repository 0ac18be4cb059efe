//! A real Device-DAX device: an NVDIMM of a guest machine without hardware virtualisation, in which test programs of kv-cxl
//! and kv-connector run as they are, and which is killed while an engine stores.

mod guest;
mod image;
mod packages;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use self::guest::{Boot, Log};
use super::{
    Report,
    guard::{is_root, succeed},
    home,
};
use crate::{run, tally::Tally};

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// kv-cxl's test programs that run in the guest: they need nothing of it.
const PROGRAMS: [&str; 2] = ["dax_device", "dax_ring"];
/// kv-connector's, with the libraries that it loads: built as everywhere else, so that it is built once.
const ENGINE: &str = "dax_engine";
/// Of the NVDIMM; some of it holds the kernel's page structures.
const MEMORY_BYTES: u64 = 256 << 20;
/// The machine is killed when it has said that this chunk is stored.
const KILL_AT: u32 = 20;
/// A boot with all tests takes some 20 s on two cores; a loaded machine is slower.
const BOOT_MAX: Duration = Duration::from_secs(150);

pub(super) fn run(report: &mut Report) -> Result<()> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        report.skip("dax", "the guest is an x86-64 Linux machine");
        return Ok(());
    }
    if !is_root() {
        report.skip("dax", "installing QEMU needs root");
        return Ok(());
    }
    let home = home("dax")?;
    let parts = match packages::get(&home) {
        Ok(parts) => parts,
        Err(error) => {
            report.skip("dax", &format!("the guest's parts cannot be had: {error:#}"));
            return Ok(());
        }
    };
    let image = image::make(&home, &parts, &programs(&home)?, &engine(&home)?)?;
    let memory = home.join("nvdimm");
    let _ = fs::remove_file(&memory);
    let file = File::create(&memory).with_context(|| format!("create {}", memory.display()))?;
    file.set_len(MEMORY_BYTES).with_context(|| format!("size {}", memory.display()))?;
    let boot = |words: &str| Boot {
        qemu: parts.qemu.clone(),
        kernel: parts.kernel.clone(),
        image: image.clone(),
        memory: memory.clone(),
        memory_bytes: MEMORY_BYTES,
        words: words.to_owned(),
    };
    let (first, last_stored) = tests_then_kill(&boot("kvbraid.phase=tests"))?;
    let killed = first.text.lines().find_map(killed).context("no store was killed in the guest")?;
    let words =
        format!("kvbraid.phase=recover kvbraid.stored={last_stored} kvbraid.killed={killed}");
    let second = boot(&words).run(BOOT_MAX, |_| false)?;
    ensure!(second.has("GUEST end"), "the second boot did not end:\n{}", second.tail());
    let log = format!("{}\n{}", first.text, second.text);
    let path = run::root().join("target/xtask/e2e-dax.log");
    fs::create_dir_all(path.parent().context("it has one")?)?;
    fs::write(&path, &log).with_context(|| format!("write {}", path.display()))?;
    let tally = Tally::read(&log);
    ensure!(tally.passed + tally.failed > 0, "no test ran in the guest: {}", path.display());
    if tally.failed > 0 {
        println!("{}\n(all of it: {})", crate::tally::trouble(&log), path.display());
    }
    println!(
        "dax: {} passed, {} failed, {} skipped in the guest; killed after chunk {last_stored}; \
         boots took {:.1} s and {:.1} s",
        tally.passed,
        tally.failed,
        tally.skips.len(),
        first.took.as_secs_f64(),
        second.took.as_secs_f64()
    );
    report.count(&tally, "dax");
    Ok(())
}

/// Runs every test, then stores, and kills the machine on the way: what it said, and the last chunk that it had stored.
fn tests_then_kill(boot: &Boot) -> Result<(Log, u32)> {
    let log = boot.run(BOOT_MAX, |line| stored(line).is_some_and(|number| number >= KILL_AT))?;
    let last = log.text.lines().filter_map(stored).max();
    match last {
        Some(last) if log.killed => Ok((log, last)),
        _ => bail!("the guest did not store until it was killed:\n{}", log.tail()),
    }
}

fn stored(line: &str) -> Option<u32> {
    line.rsplit_once("STORED ")?.1.trim().parse().ok()
}

/// The last chunk of the store whose process the guest has killed.
fn killed(line: &str) -> Option<u32> {
    line.rsplit_once("GUEST killed a store after ")?.1.trim().parse().ok()
}

/// Builds the test programs so that they need nothing of the guest.
fn programs(home: &Path) -> Result<Vec<PathBuf>> {
    let mut command = run::cargo();
    command.args(["test", "--locked", "--package", "kv-cxl", "--no-run", "--target", TARGET]);
    command.args(["--message-format", "json-render-diagnostics", "--target-dir"]);
    command.arg(home.join("build")).env("RUSTFLAGS", "-C target-feature=+crt-static");
    // Nobody debugs in there, and a small image boots sooner.
    command.env("CARGO_PROFILE_DEV_DEBUG", "none").env("CARGO_PROFILE_DEV_STRIP", "symbols");
    for program in PROGRAMS {
        command.args(["--test", program]);
    }
    let finished = run::logged("e2e dax build", &mut command)?;
    ensure!(finished.success, "kv-cxl's test programs do not build");
    PROGRAMS.iter().map(|program| executable(&finished.log, program)).collect()
}

/// The program of that name, by what cargo said.
fn executable(log: &str, program: &str) -> Result<PathBuf> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let path = lines
        .filter(|line| line["target"]["name"] == program)
        .find_map(|line| line["executable"].as_str().map(PathBuf::from));
    path.with_context(|| format!("cargo built no {program}"))
}

/// kv-connector's test program, without what debuggers want of it: a small image boots sooner.
fn engine(home: &Path) -> Result<PathBuf> {
    let mut command = run::cargo();
    command.args(["test", "--locked", "--package", "kv-connector", "--no-run", "--test", ENGINE]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let finished = run::logged("e2e dax engine build", &mut command)?;
    ensure!(finished.success, "kv-connector's test program does not build");
    let stripped = home.join(ENGINE);
    let built = executable(&finished.log, ENGINE)?;
    succeed(Command::new("strip").arg("-o").arg(&stripped).arg(&built))?;
    Ok(stripped)
}
