//! A real LMCache with the wheel as its L2 adapter, judged by LMCache's own checks.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use super::{
    Report, home,
    wheel::{install, python_tests},
};
use crate::wheel::{build, environment, quiet, tools};

/// Installs quickly, and takes overrides.
const INSTALLER: &str = "uv==0.13.9";
const LMCACHE: &str = "lmcache==0.5.6";
/// What LMCache was tried with, and what of its requirements a machine without an accelerator does not need.
const OVERRIDES: &str = "\
torch==2.13.0
numpy<=2.2.6
protobuf>=6.31.1
awscrt; sys_platform == 'never'
cuda-bindings; sys_platform == 'never'
cuda-core; sys_platform == 'never'
cuda-python; sys_platform == 'never'
cufile-python; sys_platform == 'never'
cupy-cuda13x; sys_platform == 'never'
google-cloud-bigtable; sys_platform == 'never'
google-cloud-monitoring; sys_platform == 'never'
hf-xet; sys_platform == 'never'
triton; sys_platform == 'never'
";

pub(super) fn run(report: &mut Report) -> Result<()> {
    let home = home("lmcache")?;
    let installed = tools().and_then(|tools| {
        fetch(&home)?;
        Ok(tools)
    });
    let tools = match installed {
        Ok(tools) => tools,
        Err(error) => {
            report.skip("lmcache", &format!("{LMCACHE} cannot be installed: {error:#}"));
            return Ok(());
        }
    };
    let venv = home.join("venv");
    install(&venv, &build(&tools)?)?;
    python_tests(report, &venv, "check_lmcache.py", &[])
}

/// LMCache in an environment of its own; kept from run to run.
fn fetch(home: &Path) -> Result<()> {
    let (uv, venv) = (home.join("uv"), home.join("venv"));
    environment(&uv, &[INSTALLER])?;
    environment(&venv, &[])?;
    let (overrides, stamp) = (home.join("overrides.txt"), home.join("installed"));
    let wanted = format!("{LMCACHE}\n{OVERRIDES}");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    fs::write(&overrides, OVERRIDES).with_context(|| format!("write {}", overrides.display()))?;
    let mut command = Command::new(uv.join("bin/uv"));
    command.args(["pip", "install", "--quiet", "--python"]).arg(venv.join("bin/python"));
    quiet(command.arg("--override").arg(&overrides).arg(LMCACHE))?;
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))
}
