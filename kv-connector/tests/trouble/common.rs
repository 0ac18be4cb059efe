//! Engines over tiers that can be made to fail, and loads whose every byte is checked.

use std::{
    env, fs,
    os::unix::fs::MetadataExt,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use kv_chunk::{ChunkKey, Namespace};
use kv_connector::{
    ByteSize, Config, Engine, EngineStats, Outcome, StepReport, Stored, TierConfig, TierId,
    TierMask, Want,
    replay::{fill, wrong_bytes},
};
use kv_tiers::{FaultHandle, FaultPlan, Faulty, MemoryConfig, MemoryTier, Tier};

use crate::testing;
pub(crate) use crate::testing::key;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// For what need not be right, only bounded.
pub(crate) const SHORT: Duration = Duration::from_secs(2);

pub(crate) fn namespace() -> Namespace {
    testing::namespace("test")
}

pub(crate) fn keys(chunks: impl IntoIterator<Item = u64>) -> Vec<ChunkKey> {
    chunks.into_iter().map(key).collect()
}

/// Four sizes: half a block, a block and a bit, two blocks and a half, and small.
pub(crate) fn bytes_of(key: &ChunkKey) -> usize {
    let [first, ..] = key.digest().to_bytes();
    [512 << 10, (1 << 20) + 1, 5 << 19, 4_099][usize::from(first % 4)]
}

pub(crate) fn payload(key: &ChunkKey) -> Vec<u8> {
    let mut payload = vec![0; bytes_of(key)];
    fill(key.digest(), &mut payload);
    payload
}

/// Memory tiers `t0`, `t1`, ... for chunks of up to 2.5 MiB; nothing is cached, deadlines are short.
pub(crate) fn config(tiers: u8) -> Config {
    let tier = |tier| TierConfig::memory(&format!("t{tier}"), ByteSize::gib(1));
    with_settings(Config::new((0..tiers).map(tier).collect()))
}

/// As [`config`], of files in `root`.
pub(crate) fn file_config(root: &Path, tiers: u8, capacity: ByteSize) -> Config {
    let tier = |tier: u8| {
        let name = format!("t{tier}");
        TierConfig::nvme(&name, root.join(&name), capacity)
    };
    with_settings(Config::new((0..tiers).map(tier).collect()))
}

fn with_settings(mut config: Config) -> Config {
    config.engine.chunk_bytes_max = ByteSize(5 << 19);
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::mib(40);
    config.engine.cache_stores = false;
    config.engine.read_deadline_ms = 1_000;
    config.engine.step_deadline_ms = 20_000;
    config.engine.write_max_age_ms = 10;
    config.engine.write_back_off_ms = 20;
    config.engine.close_deadline_ms = 5_000;
    for tier in &mut config.tiers {
        tier.window = Some(4);
    }
    config
}

/// An engine whose every tier can be made to fail.
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) faults: Vec<FaultHandle>,
}

pub(crate) fn rig(config: Config) -> Rig {
    let arenas = Engine::arenas(&config).unwrap();
    let memory = |tier: &TierConfig| {
        MemoryTier::new(MemoryConfig::new(&tier.name, tier.capacity.unwrap().0))
    };
    let faulty = |tier| Faulty::new(Box::new(memory(tier)), FaultPlan::NONE);
    let tiers: Vec<Faulty> = config.tiers.iter().map(faulty).collect();
    let faults = tiers.iter().map(Faulty::handle).collect();
    let tiers = tiers.into_iter().map(|tier| Box::new(tier) as Box<dyn Tier>).collect();
    Rig { engine: Engine::with_tiers(config, arenas, tiers).unwrap(), faults }
}

/// Stores the chunks and waits until every tier has finished them.
pub(crate) fn fill_tiers(engine: &Engine, keys: &[ChunkKey]) {
    // Fewer at a time than staging holds: back-pressure would give up replicas.
    for keys in keys.chunks(8) {
        keys.iter().for_each(|key| store(engine, key));
        assert!(engine.flush(PATIENCE).drained, "{:#?}", engine.stats());
    }
}

/// Stores a chunk, waiting for room.
pub(crate) fn store(engine: &Engine, key: &ChunkKey) {
    let payload = payload(key);
    let stored = wait_for(|| !matches!(engine.store(key, &payload), Stored::Refused(_)));
    assert!(stored, "no room: {:#?}", engine.stats());
}

pub(crate) fn only(tier: u8) -> TierMask {
    TierMask::only(TierId(tier))
}

/// Loads from any tier and checks every byte of every hit.
pub(crate) fn load(engine: &Engine, keys: &[ChunkKey]) -> (StepReport, Vec<Outcome>) {
    load_from(engine, keys, TierMask::all(8))
}

pub(crate) fn load_from(
    engine: &Engine,
    keys: &[ChunkKey],
    tiers: TierMask,
) -> (StepReport, Vec<Outcome>) {
    let lease = engine.lookup(keys);
    let mut buffers: Vec<Vec<u8>> = keys.iter().map(|key| vec![0xee; bytes_of(key)]).collect();
    let mut wants: Vec<Want<'_>> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    for want in &mut wants {
        want.tiers = tiers;
    }
    let report = engine.load(&lease, &mut wants);
    assert_honest(&report, &wants);
    let outcomes = wants.iter().map(|want| want.outcome).collect();
    (report, outcomes)
}

/// Every hit holds its chunk's bytes, and the report counts what the wants say.
pub(crate) fn assert_honest(report: &StepReport, wants: &[Want<'_>]) {
    let hits = wants.iter().filter(|want| want.outcome.is_hit());
    for want in hits.clone() {
        let wrong = wrong_bytes(want.key.digest(), want.dest);
        assert_eq!(wrong, 0, "{:?}: {:?}", want.key, want.outcome);
    }
    assert_eq!(report.wanted, wants.len() as u64);
    assert_eq!(report.hits(), hits.count() as u64);
    assert_eq!(report.hits() + report.misses(), report.wanted);
}

pub(crate) fn all_hit(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|outcome| outcome.is_hit())
}

pub(crate) fn none_hit(outcomes: &[Outcome]) -> bool {
    !outcomes.iter().any(|outcome| outcome.is_hit())
}

/// Whether it becomes true within [`PATIENCE`].
pub(crate) fn wait_for(mut is_true: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if is_true() {
            return true;
        }
        thread::sleep(Duration::from_millis(2));
    }
    is_true()
}

/// Once nothing is in flight, every slot is free and no chunk leased.
pub(crate) fn assert_nothing_is_held(engine: &Engine) {
    let all_free = |stats: &EngineStats| {
        let memories = [&stats.read_memory, &stats.staging_memory];
        memories.iter().all(|memory| memory.free_slots == memory.bytes / memory.slot_bytes)
    };
    let free = wait_for(|| {
        let stats = engine.stats();
        all_free(&stats) && stats.chunks_leased == 0
    });
    assert!(free, "something is still held: {:#?}", engine.stats());
}

/// The seeds to try, printed so that a failure can be repeated.
pub(crate) fn seeds(default: u64) -> Vec<u64> {
    let number = |name| env::var(name).ok().map(|text: String| text.parse::<u64>().unwrap());
    match number("KVBRAID_SEED") {
        Some(seed) => vec![seed],
        None => (1..=number("KVBRAID_SEEDS").unwrap_or(default)).collect(),
    }
}

/// What a directory takes on the disk, as `du` counts.
pub(crate) fn disk_bytes(directory: &Path) -> u64 {
    let blocks = |metadata: fs::Metadata| metadata.blocks() * 512;
    let own = fs::metadata(directory).map_or(0, blocks);
    let entries = fs::read_dir(directory).unwrap();
    // What is given back meanwhile takes no space.
    own + entries.map(|entry| entry.unwrap().metadata().map_or(0, blocks)).sum::<u64>()
}
