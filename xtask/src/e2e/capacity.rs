//! A store under fifty times its cap of writes, and a second model after it.

use anyhow::Result;

use super::Report;

pub(super) fn run(report: &mut Report) -> Result<()> {
    let mib = if report.full { 1024 } else { 102 };
    println!("a cap of {mib} MiB, {} MiB of writes", 50 * mib);
    let cap = [("KVBRAID_CAPACITY_MIB", mib.to_string())];
    report.tests("capacity", ("kv-tiers", "nvme_capacity"), &[], &cap)?;
    Ok(())
}
