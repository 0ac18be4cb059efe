//! What containers and ordinary users are denied.

use anyhow::Result;

use super::Report;

pub(super) fn run(report: &mut Report) -> Result<()> {
    report.tests("seccomp engine", ("kv-connector", "denied"), &[], &[])?;
    report.tests("seccomp driver", ("kv-tiers", "nvme_fallback"), &[], &[])?;
    Ok(())
}
