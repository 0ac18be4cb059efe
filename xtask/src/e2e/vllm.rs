//! A real vLLM on the processor: with the wheel as its secondary tier, over LMCache's server, and as the README starts it.

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
    python_tests(report, &venv, "check_vllm.py", &[])?;
    python_tests(report, &venv, "check_vllm_claims.py", &[])
}
