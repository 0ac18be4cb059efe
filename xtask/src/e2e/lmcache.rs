//! A real LMCache with the wheel as its L2 adapter, judged by LMCache's own checks.

use anyhow::Result;

use super::{Report, wheel::python_tests};
use crate::engines::{self, Absent};

pub(super) fn run(report: &mut Report) -> Result<()> {
    match engines::with_wheel()? {
        Ok(venv) => python_tests(report, &venv, "check_lmcache.py", &[]),
        Err(Absent(why)) => {
            report.skip("lmcache", &why);
            Ok(())
        }
    }
}
