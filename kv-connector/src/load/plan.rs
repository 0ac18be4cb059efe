//! How the tiers share a step, and the words for what they could not deliver.

use std::sync::atomic::Ordering;

use kv_router::{ChunkStatus, Failure, MAX_TIERS, MissReason as PoolMiss, PoolConfig, TierId};

use crate::{MissReason, shared::Shared};

pub(super) fn pool_config(shared: &Shared) -> PoolConfig {
    let tiers = u8::try_from(shared.tiers.len()).unwrap_or(MAX_TIERS);
    let mut config = PoolConfig::new(tiers);
    config.fastest = fastest(shared);
    config.tail = shared.config.tail.into();
    for (window, tier) in config.windows.iter_mut().zip(&shared.tiers) {
        *window = u16::try_from(tier.window()).unwrap_or(u16::MAX);
    }
    config
}

/// By live rates once all are known, until then as configured.
fn fastest(shared: &Shared) -> TierId {
    let mut fastest = (TierId(0), 0);
    for tier in &shared.tiers {
        let rate = tier.counters.bytes_per_s.load(Ordering::Relaxed);
        if rate == 0 {
            return TierId(0);
        }
        if rate > fastest.1 {
            fastest = (tier.id, rate);
        }
    }
    fastest.0
}

/// Why the pool gave a chunk up; `None` if it has not.
pub(super) fn miss_reason(status: Option<ChunkStatus>) -> Option<MissReason> {
    let Some(ChunkStatus::Missed(reason)) = status else { return None };
    Some(match reason {
        PoolMiss::NoReplica => MissReason::NotHeld,
        PoolMiss::TierMasked => MissReason::TierMasked,
        PoolMiss::Cancelled => MissReason::StepDeadline,
        PoolMiss::Failed(failure) => match failure {
            Failure::TimedOut => MissReason::TimedOut,
            Failure::Corrupt => MissReason::Corrupt,
            Failure::NotFound => MissReason::Lost,
            Failure::Unavailable => MissReason::TierGone,
            _ => MissReason::Io,
        },
        _ => MissReason::NotLoaded,
    })
}
