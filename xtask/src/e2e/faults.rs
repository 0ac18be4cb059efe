//! Faults as values, a full file system, and processes that are killed.

use anyhow::Result;

use super::Report;

pub(super) fn run(report: &mut Report) -> Result<()> {
    let (runs, kills) = if report.full { (10_000, 200) } else { (1_000, 20) };
    println!("{runs} seeded runs, {kills} kills");
    // One heap for the thousands of threads that come and go: each arena's look at its pages walks all memory.
    let heap = ("MALLOC_ARENA_MAX", "1".to_owned());
    let runs = [("KVBRAID_RUNS", runs.to_string()), heap];
    report.tests("faults", ("kv-connector", "campaign"), &[], &runs)?;
    let kills = [("KVBRAID_KILLS", kills.to_string())];
    report.tests("kills", ("kv-connector", "kill9"), &[], &kills)?;
    let sequences = if report.full { 1_000_000 } else { 100_000 };
    println!("{sequences} random sequences against the staging controller");
    let sequences = [("KVBRAID_SEQUENCES", sequences.to_string())];
    report.tests("staging", ("kv-staging", "staging"), &["random"], &sequences)?;
    Ok(())
}
