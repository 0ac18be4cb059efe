//! A real SGLang host pool with the wheel as its HiCache storage; no engine runs, no GPU is needed.

use std::env;

use anyhow::Result;

use super::{Report, wheel::python_tests};
use crate::{
    engines::{self, Absent},
    run,
};

pub(super) fn run(report: &mut Report) -> Result<()> {
    let found = engines::with_wheel()?.and_then(|venv| Ok((venv, engines::sglang()?)));
    let (venv, sglang) = match found {
        Ok(found) => found,
        Err(Absent(why)) => {
            report.skip("sglang", &why);
            return Ok(());
        }
    };
    // It has only what the environment lacks.
    let readme = run::root().join("README.md");
    let variables = [
        ("PYTHONPATH", env::join_paths([sglang])?.to_string_lossy().into_owned()),
        ("KVBRAID_README", readme.to_string_lossy().into_owned()),
    ];
    python_tests(report, &venv, "check_sglang.py", &variables)
}
