//! A real vLLM on the processor: with the wheel as its secondary tier, and over LMCache's server.

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
    for script in ["check_vllm.py", "check_vllm_claims.py", "check_vllm_lmcache.py"] {
        python_tests(report, &venv, script, &[])?;
    }
    Ok(())
}
