//! What parent and child agree on: keys, sizes, content, configuration.

use std::path::{Path, PathBuf};

use kv_connector::{ByteSize, Config, SharedSection, TierConfig};

pub(crate) use crate::testing::key;

pub(crate) const TIERS: u8 = 3;
/// The last one is a directory that many nodes might share.
pub(crate) const SHARED: u8 = 2;

/// How much room the chunks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Nothing is ever evicted.
    Ample,
    /// A fraction of the chunks fits.
    Tight,
}

impl Room {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ample => "ample",
            Self::Tight => "tight",
        }
    }

    pub(crate) fn named(name: &str) -> Self {
        if name == "tight" { Self::Tight } else { Self::Ample }
    }

    /// Chunks that the child stores, over all of its lives.
    pub(crate) fn chunks(self) -> u64 {
        match self {
            Self::Ample => 1_500,
            Self::Tight => 400,
        }
    }

    pub(crate) fn capacity(self) -> ByteSize {
        match self {
            Self::Ample => ByteSize::gib(1),
            Self::Tight => ByteSize::mib(12),
        }
    }
}

/// Three sizes, so that classes of segments compete; none is a multiple of a block but the first.
pub(crate) fn payload_bytes(chunk: u64) -> usize {
    [64 << 10, 100_001, 300_000][usize::try_from(chunk % 3).unwrap()]
}

pub(crate) fn tier_directory(root: &Path, tier: u8) -> PathBuf {
    root.join(format!("tier{tier}"))
}

pub(crate) fn ledger_path(root: &Path) -> PathBuf {
    root.join("ledger")
}

/// Tiers of files of both kinds, and as little memory as works, so that loads really read and stores really wait.
pub(crate) fn config(root: &Path, room: Room) -> Config {
    let tier = |tier: u8| {
        let (name, directory) = (format!("tier{tier}"), tier_directory(root, tier));
        if tier == SHARED {
            let mut tier = TierConfig::shared(&name, directory, room.capacity());
            // A dead leader is soon replaced, and what it left is soon counted.
            let mut quick = SharedSection::default();
            (quick.lease_ttl_ms, quick.count_every_ms) = (300, 100);
            tier.shared = Some(quick);
            return tier;
        }
        let mut tier = TierConfig::nvme(&name, directory, room.capacity());
        tier.segment = Some(ByteSize::mib(2));
        tier
    };
    let mut config = Config::new((0..TIERS).map(tier).collect());
    config.engine.chunk_bytes_max = ByteSize::kib(512);
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::mib(8);
    config.engine.cache_stores = false;
    config.engine.write_max_age_ms = 10;
    config
}
