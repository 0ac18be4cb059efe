//! Statistics as text, made from their JSON: an engine of another version may know other fields.

use std::fmt::{Display, Write};

use kv_connector::ByteSize;
use serde_json::Value;

/// One screen of what matters.
pub(crate) fn render(stats: &Value) -> String {
    let mut text = String::new();
    if stats["offline"] == true {
        line(&mut text, "engine", "none answers: this is what the directories hold");
    } else {
        engine(&mut text, stats);
    }
    for each in stats["tiers"].as_array().into_iter().flatten() {
        text.push('\n');
        tier(&mut text, each);
    }
    text
}

fn engine(text: &mut String, stats: &Value) {
    let (hits, wanted) = (number(&stats["hits"]), number(&stats["wanted"]));
    let steps = number(&stats["steps"]);
    line(text, "loads", format_args!("{hits} of {wanted} chunks in {steps} steps"));
    let sources = [("host cache", &stats["hits_host_cache"]), ("staged", &stats["hits_staged"])];
    let tiers = stats["tiers"].as_array().into_iter().flatten();
    let tiers = tiers.map(|tier| (tier["name"].as_str().unwrap_or("?"), &tier["hits"]));
    let sources: Vec<String> = sources
        .into_iter()
        .chain(tiers)
        .map(|(name, count)| format!("{name} {}", number(count)))
        .collect();
    line(text, "hits", sources.join(", "));
    line(text, "misses", counts(number(&stats["misses"]), &stats["miss_reasons"]));
    if let Some(gap) = stats["gap"].as_f64() {
        line(text, "gap", format_args!("{:.1} % over the bound", gap * 100.0));
    }
    let (stored, held) = (number(&stats["stored"]), number(&stats["already_held"]));
    let refused: u64 =
        stats["refused"].as_object().into_iter().flatten().map(|(_, it)| number(it)).sum();
    let refused = counts(refused, &stats["refused"]);
    line(text, "stores", format_args!("{stored} staged, {held} already held, refused {refused}"));
    let replicas = ["replicas_written", "replicas_failed", "replicas_dropped", "pending_writes"]
        .map(|name| format!("{} {}", number(&stats[name]), name.trim_start_matches("replicas_")));
    line(text, "replicas", replicas.join(", ").replace('_', " "));
    let (held, leased) = (number(&stats["chunks_held"]), number(&stats["chunks_leased"]));
    line(text, "chunks", format_args!("{held} on any tier, {leased} leased"));
    for (name, key) in [("read memory", "read_memory"), ("staging", "staging_memory")] {
        let memory = &stats[key];
        let locked = if memory["locked"] == true { ", locked" } else { ", not locked" };
        let huge = bytes(&memory["huge_page_bytes"]);
        line(
            text,
            name,
            format_args!("{}, {huge} of it huge pages{locked}", bytes(&memory["bytes"])),
        );
    }
}

fn tier(text: &mut String, tier: &Value) {
    let word = |name: &str| tier[name].as_str().unwrap_or("").to_owned();
    let (breaker, state) = (word("breaker"), word("state"));
    let state = match (breaker.as_str(), state.as_str()) {
        ("closed", _) => "serving",
        ("open", _) => "not read: its breaker is open",
        ("half_open", _) => "read on trial: its breaker is half open",
        ("", "opened") => "no engine has it",
        ("", other) | (other, _) => other,
    };
    let _ = writeln!(text, "tier {} ({state})", word("name"));
    if tier["path"].is_string() {
        line(text, "  path", word("path"));
    }
    let (used, cap) = (&tier["used_bytes"], &tier["capacity_bytes"]);
    #[expect(clippy::cast_precision_loss, reason = "a share in per cent")]
    let share = number(used) as f64 * 100.0 / number(cap).max(1) as f64;
    line(text, "  used", format_args!("{} of {} ({share:.1} %)", bytes(used), bytes(cap)));
    line(text, "  chunks", number(&tier["chunks"]));
    if tier["payload_bytes"].is_u64() && tier["state"].is_string() {
        line(text, "  payload", bytes(&tier["payload_bytes"]));
    }
    for (label, keys) in [
        ("  delivered", &["payload_bytes", "late_bytes"][..]),
        ("  device", &["read_bytes", "write_bytes", "bytes_per_s"]),
    ] {
        if tier["breaker"].is_string() {
            let parts: Vec<String> = keys
                .iter()
                .map(|key| format!("{} {}", key.replace('_', " "), bytes(&tier[key])))
                .collect();
            line(text, label, parts.join(", "));
        }
    }
    let kinds = [
        "recovered_chunks",
        "evictions",
        "lost_chunks",
        "corrupt_reads",
        "timed_out_reads",
        "purged_chunks",
        "scrubbed_chunks",
        "scrub_damaged",
        "torn_slots",
        "newer_chunks",
    ];
    let known = kinds.iter().filter(|kind| number(&tier[**kind]) > 0);
    let known: Vec<String> =
        known.map(|kind| format!("{} {}", kind.replace('_', " "), number(&tier[*kind]))).collect();
    if !known.is_empty() {
        line(text, "  events", known.join(", "));
    }
    for (label, key) in [("  errors", "errors"), ("  other files", "files")] {
        let sum: u64 = tier[key].as_object().into_iter().flatten().map(|(_, it)| number(it)).sum();
        if sum > 0 {
            line(text, label, counts(sum, &tier[key]));
        }
    }
    claims(text, &tier["claims"]);
    line(text, "  window", window(tier));
    line(
        text,
        "  io",
        if word("io_mode").is_empty() { "plain".to_owned() } else { word("io_mode") },
    );
    for fallback in tier["fallbacks"].as_array().into_iter().flatten() {
        line(text, "  fallback", fallback.as_str().unwrap_or(""));
    }
}

/// Claims on a tier that takes them.
fn claims(text: &mut String, claims: &Value) {
    if !claims.is_object() {
        return;
    }
    let living: u64 =
        claims["states"].as_object().into_iter().flatten().map(|(_, it)| number(it)).sum();
    line(text, "  claims", counts(living, &claims["states"]));
    let events = ["recorded", "ready", "early", "late", "blocked", "demand", "failed", "cancelled"];
    let events = events.map(|event| format!("{} {event}", number(&claims[event])));
    line(text, "  of all", events.join(", "));
    let word = |name: &str| claims[name].as_str().unwrap_or("").to_owned();
    let (policy, protection) = (word("policy"), word("protection"));
    let use_by = word("use_by");
    let (reserved, budget) = (bytes(&claims["reserved_bytes"]), bytes(&claims["budget_bytes"]));
    let c = claims["c_gib_s_per_claim"].as_f64().unwrap_or(0.0);
    line(
        text,
        "  protected",
        format_args!(
            "{reserved} of {budget} ({policy} by {use_by}, {protection}), C {c:.3} GiB s a claim"
        ),
    );
}

fn line(text: &mut String, label: &str, value: impl Display) {
    let _ = writeln!(text, "{label:<12} {value}");
}

/// `7 (io 3, lost 4)`
fn counts(sum: u64, by_kind: &Value) -> String {
    let kinds = by_kind.as_object().into_iter().flatten();
    let kinds: Vec<String> = kinds
        .filter(|(_, count)| number(count) > 0)
        .map(|(kind, count)| format!("{} {}", kind.replace('_', " "), number(count)))
        .collect();
    if kinds.is_empty() { sum.to_string() } else { format!("{sum} ({})", kinds.join(", ")) }
}

/// The number, and how sure it is.
fn window(tier: &Value) -> String {
    let search = &tier["window_search"];
    match (tier["window"].as_u64(), search["state"].as_str()) {
        (None, _) => "learned when open".to_owned(),
        (Some(window), None) => window.to_string(),
        (Some(window), Some(state)) => match search["probe"]["window"].as_u64() {
            Some(probed) => format!("{window}, {state} (probed {probed})"),
            None => format!("{window}, {state}"),
        },
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// In the largest unit that leaves at least 1.
fn bytes(value: &Value) -> String {
    let bytes = number(value);
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => ByteSize(bytes).to_string(),
    }
}
