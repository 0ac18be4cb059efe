//! What the engine's tests share: keys, payloads that follow from them, and engines over memory tiers.

use std::time::Duration;

use kv_chunk::ChunkKey;
use kv_connector::{
    Arenas, ByteSize, Config, Engine, Outcome, StepReport, Stored, TierConfig, TierMask, Want,
};
use kv_tiers::{FaultHandle, FaultPlan, Faulty, MemoryConfig, MemoryTier, Tier};

pub(crate) use crate::testing::key;

/// Small, so that tests move few bytes: those that need blocks of a chunk say so.
pub(crate) const CHUNK_BYTES: usize = 5 << 17;
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) fn keys(range: std::ops::Range<u64>) -> Vec<ChunkKey> {
    range.map(key).collect()
}

/// Bytes that only this key's chunk has.
pub(crate) fn payload_of(key: &ChunkKey, bytes: usize) -> Vec<u8> {
    let seed = u64::from_le_bytes(*key.digest().to_bytes().first_chunk().unwrap());
    let mut random = fastrand::Rng::with_seed(seed);
    let mut payload = vec![0; bytes];
    random.fill(&mut payload);
    payload
}

/// A configuration of small memory: chunks of 1 MiB at most, `cache` cached, 16 MiB of staging.
pub(crate) fn config(tiers: &[(&str, ByteSize)], cache: ByteSize) -> Config {
    let tiers = tiers.iter().map(|(name, capacity)| TierConfig::memory(name, *capacity));
    let mut config = Config::new(tiers.collect());
    config.engine.chunk_bytes_max = ByteSize::mib(1);
    config.engine.host_cache = cache;
    config.engine.staging = ByteSize::mib(16);
    config.engine.cache_stores = false;
    config
}

/// Memory tiers as `config` describes them, to be wrapped.
pub(crate) fn memory_tier(config: &Config, index: usize) -> Box<dyn Tier> {
    let tier = &config.tiers[index];
    Box::new(MemoryTier::new(MemoryConfig::new(&tier.name, tier.capacity.unwrap().0)))
}

/// An engine over memory tiers that fail as they are told to.
pub(crate) fn faulty_engine(config: Config) -> (Engine, Vec<FaultHandle>) {
    let arenas = arenas(&config);
    let mut handles = Vec::new();
    let tiers = (0..config.tiers.len()).map(|index| {
        let tier = Faulty::new(memory_tier(&config, index), FaultPlan::NONE);
        handles.push(tier.handle());
        Box::new(tier) as Box<dyn Tier>
    });
    let tiers = tiers.collect();
    (Engine::with_tiers(config, arenas, tiers).unwrap(), handles)
}

pub(crate) fn arenas(config: &Config) -> Arenas {
    Engine::arenas(config).unwrap()
}

/// Stores the chunks of `keys` and waits until they are on every tier.
pub(crate) fn fill(engine: &Engine, keys: &[ChunkKey]) {
    fill_sized(engine, keys, CHUNK_BYTES);
}

pub(crate) fn fill_sized(engine: &Engine, keys: &[ChunkKey], bytes: usize) {
    // Few at a time: with staging memory full, chunks would give up their second replica.
    for some in keys.chunks(4) {
        for key in some {
            while engine.store(key, &payload_of(key, bytes)) != Stored::Staged {
                assert!(engine.flush(SOON).drained);
            }
        }
        assert!(engine.flush(SOON).drained);
    }
}

/// Loads `keys` from `tiers`, checks every byte of every hit, and gives the outcomes.
pub(crate) fn load_from(
    engine: &Engine,
    keys: &[ChunkKey],
    tiers: TierMask,
) -> (StepReport, Vec<Outcome>) {
    load_sized(engine, keys, tiers, CHUNK_BYTES)
}

pub(crate) fn load(engine: &Engine, keys: &[ChunkKey]) -> (StepReport, Vec<Outcome>) {
    load_from(engine, keys, TierMask::all(8))
}

pub(crate) fn load_sized(
    engine: &Engine,
    keys: &[ChunkKey],
    tiers: TierMask,
    bytes: usize,
) -> (StepReport, Vec<Outcome>) {
    let lease = engine.lookup(keys);
    let mut buffers = vec![vec![0; bytes]; keys.len()];
    let mut wants: Vec<Want<'_>> = keys
        .iter()
        .zip(&mut buffers)
        .map(|(key, dest)| {
            let mut want = Want::new(key, dest);
            want.tiers = tiers;
            want
        })
        .collect();
    let report = engine.load(&lease, &mut wants);
    let outcomes: Vec<Outcome> = wants.iter().map(|want| want.outcome).collect();
    for ((key, buffer), outcome) in keys.iter().zip(&buffers).zip(&outcomes) {
        assert!(!outcome.is_hit() || *buffer == payload_of(key, bytes), "wrong bytes for {key:?}");
    }
    assert_eq!(report.hits() + report.misses(), report.wanted);
    assert_eq!(report.hits(), outcomes.iter().filter(|outcome| outcome.is_hit()).count() as u64);
    (report, outcomes)
}
