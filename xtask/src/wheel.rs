//! `cargo xtask wheel`: the Python package, for any Linux with glibc 2.28 or later.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::run;

/// What builds it, and a C compiler that links against an old glibc.
const TOOLS: &[&str] = &["maturin==1.16.0", "ziglang==0.17.1"];
const PLATFORM: &str = "manylinux_2_28";

/// Arguments of `cargo xtask wheel`.
#[derive(clap::Args)]
pub(crate) struct Wheel {}

impl Wheel {
    pub(crate) fn run(self) -> Result<()> {
        let tools = tools()?;
        let wheel = build(&tools)?;
        println!("{}", wheel.display());
        Ok(())
    }
}

/// The environment below the target directory that has the tools.
///
/// # Errors
/// If there is no Python, or they cannot be installed: then no wheel can be built on this machine.
pub(crate) fn tools() -> Result<PathBuf> {
    let home = run::root().join("target/wheel-tools");
    environment(&home, TOOLS)?;
    Ok(home)
}

/// Builds the wheel into `target/wheels`, from nothing but this tree.
///
/// # Errors
/// If it does not build, or would not run on as old a system as promised.
pub(crate) fn build(tools: &Path) -> Result<PathBuf> {
    let out = run::root().join("target/wheels");
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("remove {}", out.display()))?;
    }
    let mut command = Command::new(tools.join("bin/maturin"));
    command.current_dir(run::root());
    command.args(["build", "--release", "--locked", "--zig", "--compatibility", PLATFORM]);
    command.args(["--manifest-path", "kv-connector/Cargo.toml", "--out"]).arg(&out);
    // It looks for the compiler among the programs of its environment.
    let path = env::var_os("PATH").unwrap_or_default();
    let places = [tools.join("bin")].into_iter().chain(env::split_paths(&path));
    command.env("PATH", env::join_paths(places)?);
    command.env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    ensure!(run::logged("wheel", &mut command)?.success, "the wheel does not build");
    let wheels: Vec<PathBuf> =
        fs::read_dir(&out)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let [wheel] = wheels.as_slice() else { bail!("{} wheels instead of one", wheels.len()) };
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_tagged = name.contains("-cp311-abi3-") && name.contains(PLATFORM);
    ensure!(is_tagged, "{name} is not for every Python from 3.11 on and {PLATFORM}");
    Ok(wheel.clone())
}

/// A Python environment at `home` with these packages; what an earlier run installed is kept.
///
/// # Errors
/// If there is no Python of at least 3.11, or a package cannot be installed.
pub(crate) fn environment(home: &Path, packages: &[&str]) -> Result<()> {
    let stamp = home.join("installed");
    let wanted = packages.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if !home.join("bin/pip").exists() {
        let old = "import sys; sys.exit(sys.version_info < (3, 11))";
        quiet(Command::new("python3").args(["-c", old])).context("Python 3.11 or later")?;
        quiet(Command::new("python3").args(["-m", "venv"]).arg(home))?;
    }
    if !packages.is_empty() {
        quiet(Command::new(home.join("bin/pip")).args(["install", "--quiet"]).args(packages))?;
    }
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))
}

/// Runs a command; what it said is in the error, if it fails.
pub(crate) fn quiet(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = said.trim().lines().rev().take(3).collect();
        bail!("{command:?} ended with {}: {}", output.status, said.join(" / "));
    }
    Ok(())
}
