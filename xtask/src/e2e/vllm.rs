//! A real vLLM on the processor: with the wheel as its secondary tier, over LMCache's server, and as the README
//! starts it.

use anyhow::Result;

use super::{Report, wheel::python_tests};
use crate::engines::{self, Absent};

pub(super) fn run(report: &mut Report) -> Result<()> {
    let venv = match engines::with_wheel()? {
        Ok(venv) => venv,
        Err(Absent(why)) => {
            report.skip("vllm", &why);
            return Ok(());
        }
    };
    let scripts = [
        "check_vllm.py",
        "check_vllm_claims.py",
        "check_vllm_lmcache.py",
        "check_vllm_quick_start.py",
    ];
    for script in scripts {
        python_tests(report, &venv, script, &[])?;
    }
    Ok(())
}
