//! The tiers of a configuration, opened while no engine has them.

use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

use kv_chunk::HEADER_BYTES;
use kv_tiers::{Arena, ArenaConfig, Finding, FindingKind, Tier, TierError};
use nix::libc;
use serde::Serialize;

use super::read::{BLOCKS_PER_READ, READS_MAX, settle};
use crate::{
    ByteSize, Config, EngineError, TierConfig, TierKind,
    open::{Opened, open_to_look, open_to_mend},
    tier_handle::io_mode,
};

/// Every tier of a configuration, opened to be looked at: the directories' locks are taken, nothing in them is mended,
/// tidied or shrunk, and no directory is made. A directory that many nodes share has no lock: it is looked at beside
/// those that work in it, and what they do meanwhile is no damage.
#[derive(Debug)]
pub struct Offline {
    pub(super) arena: Arc<Arena>,
    /// In the order of the configuration.
    pub tiers: Vec<OfflineTier>,
    config: Config,
}

/// One tier.
pub struct OfflineTier {
    /// As configured.
    pub name: String,
    /// Its directory.
    pub path: Option<PathBuf>,
    /// Whether there is anything to look at.
    pub state: TierState,
    /// What was found besides chunks.
    pub findings: Vec<Finding>,
    /// Headers that are not whole, found at open.
    pub torn_slots: u64,
    /// Chunks that a later version wrote, found at open.
    pub newer_chunks: u64,
    pub(super) tier: Option<Box<dyn Tier>>,
    section: TierConfig,
}

impl fmt::Debug for OfflineTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OfflineTier").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Whether a tier can be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TierState {
    /// It is open.
    Opened,
    /// Its directory does not exist: no engine has used it yet.
    Absent,
    /// It lives in an engine's memory and ends with it.
    Volatile,
}

impl Offline {
    /// Opens the tiers of `config`. Fails if an engine holds one of them.
    pub fn open(config: Config) -> Result<Self, EngineError> {
        Self::open_those(config, |_| true)
    }

    /// Opens what can be looked at beside a running engine: the directories that many nodes share.
    pub fn open_beside(config: Config) -> Result<Self, EngineError> {
        Self::open_those(config, |kind| kind == TierKind::Shared)
    }

    fn open_those(config: Config, wanted: impl Fn(TierKind) -> bool) -> Result<Self, EngineError> {
        config.check()?;
        let slot_bytes = HEADER_BYTES + ((BLOCKS_PER_READ as usize) << 20);
        let arena = Arena::new(ArenaConfig::new(slot_bytes, READS_MAX))
            .map_err(|source| EngineError::Arena { purpose: "reads", source })?;
        let mut offline = Self { arena, tiers: Vec::new(), config };
        for section in offline.config.tiers.iter().filter(|section| wanted(section.kind)) {
            let mut tier = OfflineTier {
                name: section.name.clone(),
                path: section.path.clone(),
                state: TierState::Volatile,
                findings: Vec::new(),
                torn_slots: 0,
                newer_chunks: 0,
                tier: None,
                section: section.clone(),
            };
            if section.kind != TierKind::Memory {
                tier.open(&offline.arena)?;
            }
            offline.tiers.push(tier);
        }
        Ok(offline)
    }

    /// What the configuration was.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What is there.
    pub fn stats(&self) -> OfflineStats {
        OfflineStats { offline: true, tiers: self.tiers.iter().map(OfflineTier::status).collect() }
    }
}

impl OfflineTier {
    fn open(&mut self, arena: &Arc<Arena>) -> Result<(), EngineError> {
        // Whether a shared one is there is asked with a deadline: its mount may hang.
        let is_shared = self.section.kind == TierKind::Shared;
        let is_flash = self.section.kind == TierKind::Flash;
        let is_there = |path: &PathBuf| if is_flash { path.exists() } else { path.is_dir() };
        if !is_shared && !self.path.as_ref().is_some_and(is_there) {
            self.state = TierState::Absent;
            return Ok(());
        }
        let opened = match open_to_look(&self.section, arena) {
            Err(EngineError::Tier {
                source: TierError::Io { errno: libc::ENOENT, .. }, ..
            }) if is_shared => {
                self.state = TierState::Absent;
                return Ok(());
            }
            opened => opened?,
        };
        self.take(opened);
        self.state = TierState::Opened;
        Ok(())
    }

    fn take(&mut self, opened: Opened) {
        self.findings = opened.findings;
        (self.torn_slots, self.newer_chunks) = (opened.torn_slots, opened.newer_chunks);
        self.tier = Some(opened.tier);
    }

    /// Opens it anew, as it is on the medium now.
    pub(super) fn reopen(&mut self, arena: &Arc<Arena>) -> Result<(), EngineError> {
        self.tier = None;
        self.open(arena)
    }

    /// Lets the driver do what every start of an engine does to files and slots that are damaged or left over, but for
    /// shrinking to the cap; then opens it to look again.
    pub(super) fn mend(&mut self, arena: &Arc<Arena>) -> Result<(), EngineError> {
        let Some(tier) = self.tier.take() else { return Ok(()) };
        let used_bytes = tier.stats().used_bytes;
        drop(tier);
        let mut section = self.section.clone();
        let cap = section.capacity.unwrap_or_default().0;
        // Room for a journal to be written anew; of kind flash there is none.
        if section.kind != TierKind::Flash {
            section.capacity = Some(ByteSize(cap.max(used_bytes.saturating_add(64 << 20))));
        }
        let mut opened = open_to_mend(&section, arena)?;
        settle(opened.tier.as_mut());
        drop(opened);
        self.reopen(arena)
    }

    /// Findings of one kind, a line each.
    pub fn found(&self, kind: FindingKind) -> Vec<String> {
        let line = |finding: &Finding| format!("{}: {}", finding.path.display(), finding.why);
        self.findings.iter().filter(|finding| finding.kind == kind).map(line).collect()
    }

    fn status(&self) -> OfflineStatus {
        let stats = self.tier.as_ref().map(|tier| tier.stats()).unwrap_or_default();
        let mut payload_bytes = 0;
        if let Some(tier) = &self.tier {
            tier.list(&mut |_, held| payload_bytes += held.payload_bytes);
        }
        let mut findings = BTreeMap::new();
        for (name, kind) in [
            ("left_alone", FindingKind::LeftAlone),
            ("leftover", FindingKind::Leftover),
            ("damaged", FindingKind::Damaged),
        ] {
            let count = self.findings.iter().filter(|finding| finding.kind == kind).count();
            findings.insert(name.to_owned(), count as u64);
        }
        OfflineStatus {
            name: self.name.clone(),
            path: self.path.clone(),
            state: self.state,
            used_bytes: stats.used_bytes,
            capacity_bytes: self.section.capacity.unwrap_or_default().0,
            chunks: stats.chunks,
            payload_bytes,
            window: self.section.window,
            io_mode: io_mode(&stats),
            fallbacks: stats.fallbacks,
            files: findings,
            torn_slots: self.torn_slots,
            newer_chunks: self.newer_chunks,
        }
    }
}

/// What is there, as JSON shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OfflineStats {
    /// Always: no engine counts anything.
    pub offline: bool,
    /// In the order of the configuration.
    pub tiers: Vec<OfflineStatus>,
}

/// One tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OfflineStatus {
    /// As configured.
    pub name: String,
    /// Its directory.
    pub path: Option<PathBuf>,
    /// Whether there is anything to look at.
    pub state: TierState,
    /// Space that counts against the cap.
    pub used_bytes: u64,
    /// The cap.
    pub capacity_bytes: u64,
    /// Chunks that its index names.
    pub chunks: u64,
    /// Payload of those.
    pub payload_bytes: u64,
    /// Reads in flight, where the configuration says it.
    pub window: Option<u32>,
    /// How I/O is done here, such as `io_uring+o_direct`.
    pub io_mode: String,
    /// One line per fallback taken.
    pub fallbacks: Vec<String>,
    /// Files that are no chunks' : `left_alone`, `leftover`, `damaged`.
    pub files: BTreeMap<String, u64>,
    /// Headers that are not whole.
    pub torn_slots: u64,
    /// Chunks that a later version wrote.
    pub newer_chunks: u64,
}
