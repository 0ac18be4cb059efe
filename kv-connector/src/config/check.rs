//! What a configuration must satisfy before anything is opened.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use kv_chunk::MAX_PAYLOAD_BYTES;
use kv_tiers::record_bytes;

use super::{Config, EngineConfig, SharedSection, TierConfig, TierKind, flash, memory, space};
use crate::{ByteSize, EngineError};

const TIERS_MAX: usize = 8;
const HOUR_MS: u64 = 3_600_000;
const CAPACITY_MAX: ByteSize = ByteSize::gib(1 << 20);
const WINDOW_MAX: u32 = 1024;

pub(super) fn check(config: &Config) -> Result<(), EngineError> {
    check_engine(&config.engine)?;
    check_memory(config, memory::total())?;
    config.queue.check(config.engine.chunk_bytes_max)?;
    if !(1..=TIERS_MAX).contains(&config.tiers.len()) {
        let problem = format!("{} tiers", config.tiers.len());
        return fail("tier", problem, format!("name 1 to {TIERS_MAX} [[tier]] sections"));
    }
    let (mut names, mut directories) = (HashSet::new(), HashSet::new());
    for (index, tier) in config.tiers.iter().enumerate() {
        let at = |field: &str| format!("tier[{index}].{field}");
        check_tier(tier, &config.engine, at)?;
        if !names.insert(&tier.name) {
            return fail(at("name"), format!("`{}` is taken", tier.name), "give each tier its own");
        }
        if let Some(path) = &tier.path
            && !directories.insert(real_path(path))
        {
            let problem = format!("{} already belongs to another tier", path.display());
            return fail(at("path"), problem, "give each tier its own directory");
        }
    }
    Ok(())
}

fn fail(
    field: impl Into<String>,
    problem: impl Into<String>,
    fix: impl Into<String>,
) -> Result<(), EngineError> {
    Err(EngineError::config(field, problem, fix))
}

fn check_engine(engine: &EngineConfig) -> Result<(), EngineError> {
    let chunk = engine.chunk_bytes_max;
    if !(4096..=MAX_PAYLOAD_BYTES).contains(&chunk.0) {
        let fix = format!("write 4 KiB to {}", ByteSize(MAX_PAYLOAD_BYTES));
        return fail("engine.chunk_bytes_max", format!("{chunk} is no chunk size"), fix);
    }
    for (field, value) in [
        ("engine.read_deadline_ms", engine.read_deadline_ms),
        ("engine.step_deadline_ms", engine.step_deadline_ms),
        ("engine.write_max_age_ms", engine.write_max_age_ms),
        ("engine.close_deadline_ms", engine.close_deadline_ms),
        ("engine.lookup_wait_ms", engine.lookup_wait_ms),
        ("engine.write_back_off_ms", engine.write_back_off_ms),
    ] {
        if !(1..=HOUR_MS).contains(&value) {
            return fail(field, format!("{value} ms"), "write 1 ms to 1 hour (3600000)");
        }
    }
    if engine.socket.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
        return fail("engine.socket", "is empty", "write a path, or leave it out");
    }
    let record = record_bytes(chunk.0);
    if engine.staging.0 < record {
        let problem = format!("{} holds no chunk of chunk_bytes_max = {chunk}", engine.staging);
        return fail("engine.staging", problem, format!("write at least {}", ByteSize(record)));
    }
    if let Some(buffer) = engine.read_buffer
        && buffer.0 < record * TIERS_MAX as u64
    {
        let problem = format!("{buffer} holds fewer than {TIERS_MAX} chunks");
        let least = ByteSize(record * TIERS_MAX as u64);
        return fail("engine.read_buffer", problem, format!("write at least {least}"));
    }
    Ok(())
}

/// Arenas are faulted in at open: more than the machine has would end it.
fn check_memory(config: &Config, total: Option<u64>) -> Result<(), EngineError> {
    let engine = &config.engine;
    let parts = [
        ("engine.host_cache", engine.host_cache),
        ("engine.staging", engine.staging),
        ("engine.read_buffer", engine.read_buffer.unwrap_or_default()),
        ("queue.memory", config.queue.memory.unwrap_or_default()),
    ];
    let wanted = parts.iter().fold(0_u64, |sum, (_, part)| sum.saturating_add(part.0));
    let Some(total) = total.filter(|total| wanted > *total) else { return Ok(()) };
    let (field, largest) = parts.into_iter().max_by_key(|(_, part)| part.0).unwrap_or(parts[0]);
    let problem = format!("{largest} is more than this machine can give");
    fail(
        field,
        problem,
        format!("host_cache, staging, read_buffer and queue share {} of memory", ByteSize(total)),
    )
}

fn check_tier(
    tier: &TierConfig,
    engine: &EngineConfig,
    at: impl Fn(&str) -> String,
) -> Result<(), EngineError> {
    let named = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if tier.name.is_empty() || tier.name.len() > 64 || !tier.name.chars().all(named) {
        let fix = "write 1 to 64 letters, digits, `-`, `_` or `.`";
        return fail(at("name"), format!("`{}` is no name", tier.name), fix);
    }
    let Some(capacity) = tier.capacity else {
        let fix = "write how much the tier may use, such as \"100 GiB\"";
        return fail(at("capacity"), "is missing, and a tier without a cap fills its disk", fix);
    };
    let unit = tier.segment.unwrap_or_default().0.max(record_bytes(engine.chunk_bytes_max.0));
    if !(unit..=CAPACITY_MAX.0).contains(&capacity.0) {
        let fix = format!("write {} to {CAPACITY_MAX}", ByteSize(unit));
        return fail(at("capacity"), format!("{capacity} is out of range"), fix);
    }
    for (field, window) in [
        ("window", tier.window),
        ("window_max", tier.window_max),
        ("write_window", Some(tier.write_window)),
    ] {
        if let Some(window) = window
            && !(1..=WINDOW_MAX).contains(&window)
        {
            let fix = format!("write 1 to {WINDOW_MAX}");
            return fail(at(field), format!("{window} operations"), fix);
        }
    }
    if tier.window.is_some() && tier.window_max.is_some() {
        let fix = "remove it, or `window` to have it learned";
        return fail(at("window_max"), "bounds a window that is fixed", fix);
    }
    check_kind(tier, engine, &at)?;
    if tier.throttle.is_some_and(|throttle| throttle.bytes_per_s.0 == 0) {
        return fail(at("throttle.bytes_per_s"), "0 never ends", "write a rate, such as \"1 GB\"");
    }
    if tier.throttle.is_some_and(|throttle| throttle.latency_us > 60_000_000) {
        return fail(at("throttle.latency_us"), "is over a minute", "write 0 to 60000000");
    }
    if tier.alone_bytes_per_s == Some(ByteSize(0)) {
        return fail(at("alone_bytes_per_s"), "is 0", "write the measured rate or leave it out");
    }
    Ok(())
}

fn check_kind(
    tier: &TierConfig,
    engine: &EngineConfig,
    at: &impl Fn(&str) -> String,
) -> Result<(), EngineError> {
    match (tier.kind, &tier.path) {
        (TierKind::Memory, Some(_)) => {
            return fail(at("path"), "a memory tier has no directory", "remove it");
        }
        (TierKind::Nvme | TierKind::Shared, None) => {
            return fail(at("path"), "is missing", "write the directory of the tier's files");
        }
        (TierKind::Nvme | TierKind::Shared, Some(path)) if path.as_os_str().is_empty() => {
            return fail(at("path"), "is empty", "write the directory of the tier's files");
        }
        _ => {}
    }
    check_shared(tier, at)?;
    flash::check(tier, engine, memory::limit(), at)?;
    space::check(tier, at)?;
    let record = record_bytes(engine.chunk_bytes_max.0);
    match tier.segment {
        Some(_) if tier.kind != TierKind::Nvme => {
            fail(at("segment"), "only a tier of kind nvme has segments", "remove it")
        }
        Some(segment) if segment.0 < record => {
            let problem = format!("{segment} holds no chunk of {}", engine.chunk_bytes_max);
            fail(at("segment"), problem, format!("write at least {}", ByteSize(record)))
        }
        _ => Ok(()),
    }
}

fn check_shared(tier: &TierConfig, at: &impl Fn(&str) -> String) -> Result<(), EngineError> {
    let Some(section) = &tier.shared else { return Ok(()) };
    if tier.kind != TierKind::Shared {
        return fail(at("shared"), "the tier is not of kind shared", "remove it");
    }
    for (field, mode, least) in [
        ("shared.directory_mode", &section.directory_mode, 0o300),
        ("shared.file_mode", &section.file_mode, 0o600),
    ] {
        if SharedSection::mode(mode).is_none_or(|mode| mode & least != least) {
            let fix = "write an octal mode that lets the owner read and write, such as \"0770\"";
            return fail(at(field), format!("`{mode}` is no such mode"), fix);
        }
    }
    for (field, value) in [
        ("shared.absent_ttl_ms", section.absent_ttl_ms),
        ("shared.hung_after_ms", section.hung_after_ms),
        ("shared.lease_ttl_ms", section.lease_ttl_ms),
        ("shared.count_every_ms", section.count_every_ms),
    ] {
        if !(100..=24 * HOUR_MS).contains(&value) {
            return fail(at(field), format!("{value} ms"), "write 100 ms to a day (86400000)");
        }
    }
    Ok(())
}

/// The path with links resolved as far as it exists: two names of one directory are one directory.
fn real_path(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for ancestor in absolute.ancestors() {
        if let Ok(real) = ancestor.canonicalize() {
            let rest = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return real.components().chain(rest.components()).collect();
        }
    }
    absolute
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_memory_than_the_machine_has_is_refused() {
        let mut config = Config::new(vec![TierConfig::memory("m", ByteSize::gib(1))]);
        config.engine.host_cache = ByteSize::gib(64);
        let error = check_memory(&config, Some(8 << 30)).unwrap_err().to_string();
        assert!(
            error.starts_with("engine.host_cache: 64 GiB") && error.contains("8 GiB"),
            "{error}"
        );
        assert!(check_memory(&config, Some(80 << 30)).is_ok());
    }
}
