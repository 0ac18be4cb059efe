//! Why a pool could not be built.

use crate::{MAX_TIERS, TierId};

/// A step or a configuration that makes no sense. Nothing was built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// `PoolConfig::tiers` is above [`MAX_TIERS`].
    #[error("config.tiers is {tiers}: at most {MAX_TIERS} tiers can share a step")]
    TooManyTiers {
        /// The number given.
        tiers: u8,
    },
    /// `PoolConfig::fastest` is not one of the tiers.
    #[error("config.fastest is {fastest}: it must be below config.tiers, which is {tiers}")]
    UnknownFastest {
        /// The tier given.
        fastest: TierId,
        /// The number of tiers.
        tiers: u8,
    },
    /// A chunk lists a tier that the configuration does not have.
    #[error("chunk {chunk} lists {tier}: it must be below config.tiers, which is {tiers}")]
    UnknownTier {
        /// Index of the chunk.
        chunk: usize,
        /// The tier it lists.
        tier: TierId,
        /// The number of tiers.
        tiers: u8,
    },
    /// A chunk has no blocks.
    #[error("chunk {chunk} has 0 blocks: a chunk has at least one")]
    NoBlocks {
        /// Index of the chunk.
        chunk: usize,
    },
    /// More chunks than a pool can number.
    #[error("the step has {chunks} chunks: at most 2^31 - 1 fit one pool, split the step")]
    TooManyChunks {
        /// The number given.
        chunks: usize,
    },
    /// More blocks than a pool can count.
    #[error("the step has {blocks} blocks: at most 2^31 - 1 fit one pool, split the step")]
    TooManyBlocks {
        /// The number given, over all chunks.
        blocks: u64,
    },
}
