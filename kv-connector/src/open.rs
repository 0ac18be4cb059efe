//! From a configuration to tiers.

use std::{path::Path, sync::Arc, time::Duration};

use kv_tiers::{
    Arena, Finding, Latency, MemoryConfig, MemoryTier, NvmeConfig, NvmeTier, OpenAs, SharedConfig,
    SharedTier, ThrottleConfig, Throttled, Tier, TierError,
};

use crate::{
    Config, EngineConfig, EngineError, SharedSection, ThrottleSection, TierConfig, TierKind,
    arenas::Arenas,
    clock::{now_ns, ns_from_ms},
    config::windows,
    flash::{self, TierParts},
    tier_thread::CHORE_READS_MAX,
};

pub(crate) fn open_tiers(config: &Config, arenas: &Arenas) -> Result<Vec<TierParts>, EngineError> {
    let arenas = [Arc::clone(&arenas.reads), Arc::clone(&arenas.staging)];
    let tiers = config.tiers.iter().zip(windows(config));
    tiers.map(|(tier, window)| open_tier(tier, window.max, &config.engine, &arenas)).collect()
}

fn open_tier(
    tier: &TierConfig,
    window_max: u32,
    engine: &EngineConfig,
    arenas: &[Arc<Arena>],
) -> Result<TierParts, EngineError> {
    let capacity_bytes = tier.capacity.unwrap_or_default().0;
    // Reads, writes, the read that probes a tier after failures, and those in the background.
    let ops = window_max.saturating_add(tier.write_window).saturating_add(1 + CHORE_READS_MAX);
    let mut staged = None;
    let opened: Box<dyn Tier> = match tier.kind {
        TierKind::Memory => {
            let mut config = MemoryConfig::new(&tier.name, capacity_bytes);
            config.payload_bytes_max = engine.chunk_bytes_max.0;
            config.queue_ops_max = ops;
            Box::new(MemoryTier::new(config))
        }
        TierKind::Shared => {
            let mut config = shared_config(tier, capacity_bytes, window_max)?;
            config.payload_bytes_max = engine.chunk_bytes_max.0;
            config.queue_ops_max = ops;
            Box::new(SharedTier::open(config, now_ns()).map_err(|it| failed(tier, it))?)
        }
        TierKind::Nvme => {
            let mut config = nvme_config(tier, capacity_bytes)?;
            config.payload_bytes_max = engine.chunk_bytes_max.0;
            config.queue_ops_max = ops;
            Box::new(NvmeTier::open(config, arenas, now_ns()).map_err(|it| failed(tier, it))?)
        }
        TierKind::Flash => {
            let parts = flash::open(tier, engine, ops).map_err(|it| failed(tier, it))?;
            staged = parts.flash;
            parts.tier
        }
    };
    let tier: Box<dyn Tier> = match tier.throttle {
        Some(throttle) => Box::new(Throttled::new(opened, throttle_config(throttle))),
        None => opened,
    };
    Ok(TierParts { tier, flash: staged })
}

/// A tier that no engine runs.
pub(crate) struct Opened {
    pub(crate) tier: Box<dyn Tier>,
    pub(crate) findings: Vec<Finding>,
    pub(crate) torn_slots: u64,
    pub(crate) newer_chunks: u64,
}

/// Opens a tier for a tool: what is there stays as it is.
pub(crate) fn open_to_look(tier: &TierConfig, arena: &Arc<Arena>) -> Result<Opened, EngineError> {
    open_for_tool(tier, arena, true)
}

/// Opens a tier as an engine would, which mends what is damaged.
pub(crate) fn open_to_mend(tier: &TierConfig, arena: &Arc<Arena>) -> Result<Opened, EngineError> {
    open_for_tool(tier, arena, false)
}

fn open_for_tool(
    tier: &TierConfig,
    arena: &Arc<Arena>,
    look_only: bool,
) -> Result<Opened, EngineError> {
    let arenas = [Arc::clone(arena)];
    let capacity_bytes = tier.capacity.unwrap_or_default().0;
    if tier.kind == TierKind::Shared {
        let mut config = shared_config(tier, capacity_bytes, tier.window.unwrap_or(8))?;
        config.open_as = if look_only { OpenAs::Looker } else { OpenAs::Mender };
        let opened = SharedTier::open(config, now_ns()).map_err(|it| failed(tier, it))?;
        let (findings, newer_chunks) = (opened.findings().to_vec(), opened.detail().newer_chunks);
        return Ok(Opened { tier: Box::new(opened), findings, torn_slots: 0, newer_chunks });
    }
    if tier.kind == TierKind::Flash && look_only {
        let (opened, found) = flash::open_to_look(tier).map_err(|it| failed(tier, it))?;
        let torn_slots = found.torn_entries + u64::from(found.is_first_page_damaged);
        let (findings, newer_chunks) = (Vec::new(), found.newer_chunks);
        return Ok(Opened { tier: opened, findings, torn_slots, newer_chunks });
    }
    if tier.kind != TierKind::Nvme {
        let mut tier = tier.clone();
        tier.throttle = None;
        let opened = open_tier(&tier, tier.window.unwrap_or(8), &EngineConfig::default(), &arenas)?;
        let tier = opened.tier;
        return Ok(Opened { tier, findings: Vec::new(), torn_slots: 0, newer_chunks: 0 });
    }
    let mut config = nvme_config(tier, capacity_bytes)?;
    (config.look_only, config.read_all_headers) = (look_only, true);
    let opened = NvmeTier::open(config, &arenas, now_ns()).map_err(|it| failed(tier, it))?;
    let (findings, detail) = (opened.findings().to_vec(), opened.detail());
    let (torn_slots, newer_chunks) = (detail.torn_slots, detail.newer_chunks);
    Ok(Opened { tier: Box::new(opened), findings, torn_slots, newer_chunks })
}

fn failed(tier: &TierConfig, source: TierError) -> EngineError {
    EngineError::Tier { name: tier.name.clone(), source }
}

fn directory(tier: &TierConfig) -> Result<&Path, EngineError> {
    let missing = || EngineError::config("path", "is missing", "write the tier's directory");
    tier.path.as_deref().ok_or_else(missing)
}

fn nvme_config(tier: &TierConfig, capacity_bytes: u64) -> Result<NvmeConfig, EngineError> {
    let mut config = NvmeConfig::new(&tier.name, directory(tier)?, capacity_bytes);
    config.segment_bytes = tier.segment.map(|segment| segment.0);
    config.min_free_bytes = tier.min_free_bytes.unwrap_or_default().0;
    let (high, low) = tier.watermarks_permille();
    (config.high_watermark_permille, config.low_watermark_permille) = (high, low);
    Ok(config)
}

fn shared_config(
    tier: &TierConfig,
    capacity_bytes: u64,
    window_max: u32,
) -> Result<SharedConfig, EngineError> {
    let section = tier.shared.clone().unwrap_or_default();
    let mut config =
        SharedConfig::new(&tier.name, directory(tier)?, capacity_bytes, fastrand::u64(1..));
    config.modes.directory = SharedSection::mode(&section.directory_mode).unwrap_or(0o700);
    config.modes.file = SharedSection::mode(&section.file_mode).unwrap_or(0o600);
    config.min_free_bytes = section.min_free.0;
    config.absent_ttl_ns = ns_from_ms(section.absent_ttl_ms);
    config.op_timeout_ns = ns_from_ms(section.hung_after_ms);
    config.lookup_timeout_ns = config.lookup_timeout_ns.min(config.op_timeout_ns);
    config.lease_ttl = Duration::from_millis(section.lease_ttl_ms);
    config.count_every = Duration::from_millis(section.count_every_ms);
    config.threads = window_max.max(tier.write_window).clamp(4, 64);
    Ok(config)
}

fn throttle_config(section: ThrottleSection) -> ThrottleConfig {
    let mut config = ThrottleConfig::new(section.bytes_per_s.0);
    config.burst_bytes = section.burst.unwrap_or_default().0;
    config.latency = Latency::Fixed { ns: section.latency_us.saturating_mul(1_000) };
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ByteSize;

    #[test]
    fn the_space_settings_of_an_nvme_tier_reach_its_driver() {
        let mut tier = TierConfig::nvme("a", "/nowhere", ByteSize::gib(1));
        let marks = |tier: &TierConfig| {
            let config = nvme_config(tier, 1 << 30).expect("it has a directory");
            (config.high_watermark_permille, config.low_watermark_permille, config.min_free_bytes)
        };
        let driver = NvmeConfig::new("a", "/nowhere", 1 << 30);
        let defaults = (driver.high_watermark_permille, driver.low_watermark_permille, 0);
        assert_eq!(marks(&tier), defaults);
        tier.low_watermark_permille = Some(995);
        assert_eq!(marks(&tier), (995, 995, 0));
        tier.low_watermark_permille = None;
        tier.high_watermark_permille = Some(900);
        tier.min_free_bytes = Some(ByteSize(7));
        assert_eq!(marks(&tier), (900, 890, 7));
    }
}
