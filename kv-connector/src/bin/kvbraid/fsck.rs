//! `kvbraid fsck`: whether all that the tiers keep is whole.

use std::{fmt::Write, path::PathBuf};

use clap::Args;
use kv_connector::{
    ByteSize, Config,
    inspect::{CheckOptions, CheckReport, Damage, Offline, TierCheck, TierState, check},
    replay::Watch,
};

use crate::{failure::Failure, output, watch::Bar};

/// Read and verify every chunk of every tier, while no engine runs; directories that many nodes share also beside them.
///
/// Exit code 0: all is whole. 1: damage was found, also if it was removed. 2: the arguments, the configuration, or an
/// engine that runs.
#[derive(Args)]
pub(crate) struct Fsck {
    /// Engine configuration, TOML or JSON.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Remove what is damaged, and nothing else.
    #[arg(long)]
    repair: bool,
    /// Read no more than this a second, such as "200 MB".
    #[arg(long, value_name = "SIZE")]
    rate: Option<ByteSize>,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl Fsck {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let config = Config::from_file(&self.config)?;
        if self.rate == Some(ByteSize(0)) {
            return Err(Failure::usage("--rate: 0 never ends; give a rate, such as \"200 MB\""));
        }
        let bar = Bar::new(0);
        let mut offline =
            Offline::open(config.clone()).map_err(|error| Failure::busy(error, &config))?;
        bar.set_steps(offline.stats().tiers.iter().map(|tier| tier.chunks).sum());
        bar.phase("chunks verified");
        let mut options = CheckOptions::default();
        options.bytes_per_s = self.rate.map(|rate| rate.0);
        options.repair = self.repair;
        let report = check(&mut offline, &options, &mut || bar.step());
        bar.done();
        let report = report?;
        if self.json {
            output::print_json(&report)?;
        } else {
            output::print(&to_text(&report))?;
        }
        match (report.stopped, report.is_clean()) {
            (true, _) => Err(Failure::failed("stopped before the end")),
            (false, true) => Ok(()),
            (false, false) => Err(Failure::failed("damage was found; see above")),
        }
    }
}

fn to_text(report: &CheckReport) -> String {
    let mut text = String::new();
    report.tiers.iter().for_each(|tier| tier_text(&mut text, tier));
    text
}

fn tier_text(text: &mut String, tier: &TierCheck) {
    let state = match tier.state {
        Some(TierState::Absent) => "nothing there yet",
        Some(TierState::Volatile) => "memory: nothing to check",
        _ if tier.stalled => "THE DEVICE STALLED: the rest was not read",
        _ if tier.is_clean() => "clean",
        _ => "DAMAGED",
    };
    let _ = writeln!(text, "tier {}: {state}", tier.name);
    if tier.state != Some(TierState::Opened) {
        return;
    }
    let (whole, bytes) = (tier.whole_chunks, tier.whole_bytes);
    let _ = writeln!(text, "  {whole} of {} chunks whole, {bytes} bytes of payload", tier.chunks);
    let (used, cap) = (tier.used_bytes, tier.capacity_bytes);
    let over = if used > cap { ": OVER THE CAP, the next start evicts" } else { "" };
    let _ = writeln!(text, "  {used} bytes of {cap} count against the cap{over}");
    for (damage, count) in &tier.damaged {
        let _ = writeln!(text, "  {count} damaged: {}", words(*damage));
    }
    for (count, what) in [
        (tier.torn_slots, "headers that are not whole"),
        (tier.newer_chunks, "chunks of a later version: left alone"),
        (tier.changed_chunks, "chunks that other nodes changed meanwhile: not looked at"),
        (tier.removed_chunks, "damaged chunks removed"),
        (tier.removed_others, "damaged files and headers removed"),
    ] {
        if count > 0 {
            let _ = writeln!(text, "  {count} {what}");
        }
    }
    for (what, files) in [
        ("damaged file", &tier.damaged_files),
        ("leftover", &tier.leftovers),
        ("left alone", &tier.foreign_files),
    ] {
        for file in files {
            let _ = writeln!(text, "  {what} {file}");
        }
    }
}

fn words(damage: Damage) -> &'static str {
    match damage {
        Damage::Header => "the header is not whole",
        Damage::Checksum => "the payload is not what was written",
        Damage::Length => "the payload is cut short",
        Damage::OtherKey => "another chunk is stored there",
        Damage::Index => "the index says something else than the header",
        Damage::Missing => "it is gone",
        Damage::Unreadable => "the device does not give it back (left as it is)",
        _ => "unknown",
    }
}
