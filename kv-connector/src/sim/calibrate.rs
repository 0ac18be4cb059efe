//! What each tier of a profile really gives: whole chunks, alone, at its knee.

use kv_router::{ChunkSpec, PoolConfig, Tail, TierMask};

use super::{
    case::{CHUNK_BLOCKS, CHUNK_BYTES},
    machine::Machine,
    profile::{Profile, TierProfile},
};

/// Chunks of a run: a minute or more, so that how it ends does not matter.
const CHUNKS: usize = 12_000;
/// Runs; their mean is taken.
const SEEDS: u64 = 8;

impl Profile {
    /// By tier, the rate in bytes a second that it reaches without drift, reading whole chunks with
    /// its window always full. Of the drift only the mean matters: it scales rate and bound alike.
    #[must_use]
    pub fn calibrate(&self) -> Vec<f64> {
        self.tiers.iter().map(|&tier| alone(tier)).collect()
    }
}

fn alone(tier: TierProfile) -> f64 {
    let profile = Profile { name: "", about: "", tiers: vec![tier] };
    let chunk =
        ChunkSpec { tiers: TierMask::all(1), blocks: CHUNK_BLOCKS, bytes: CHUNK_BYTES, rank: 0 };
    let chunks = vec![chunk; CHUNKS];
    let mut config = PoolConfig::new(1);
    config.tail = Tail::Whole;
    let bytes = CHUNKS as f64 * CHUNK_BYTES as f64;
    let share = |seed| {
        let mut machine = Machine::new(&profile, seed);
        let _ = machine.run(&chunks, &config);
        machine.bound_s(&[tier.bytes_per_s], 0.0, bytes) / machine.now_s
    };
    tier.bytes_per_s * (0..SEEDS).map(share).sum::<f64>() / SEEDS as f64
}
