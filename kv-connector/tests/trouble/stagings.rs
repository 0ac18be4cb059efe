//! Replicas that differ, since their chunk was computed twice: read in pieces, by loads that run side by side, from
//! tiers that fail, while the chunks are stored again.

use std::{sync::Arc, thread, time::Duration};

use kv_chunk::{ChunkKey, WriteId};
use kv_connector::{ByteSize, Config, Engine, TierConfig, Want, replay::fill};
use kv_tiers::{
    Arena, ArenaConfig, FaultHandle, FaultKind, FaultPlan, Faulty, MemoryConfig, MemoryTier, Op,
    OpId, Record, ThrottleConfig, Throttled, Tier, Unguarded, When, WriteOp, record_bytes,
};

use crate::common::*;

/// Eight and four pieces, not all of one size.
const SIZES: [usize; 4] = [8 << 20, 4 << 20, (5 << 20) + 4_099, (7 << 20) - 1];
const CHUNKS: u64 = 4;
const BYTES_MAX: u64 = 8 << 20;

/// What the chunk was at its n-th computation; the last one of some chunks has another length.
fn version(chunk: u64, n: u64) -> Vec<u8> {
    let size = (chunk + u64::from(n == 3 && chunk % 2 == 1)) % CHUNKS;
    let mut payload = vec![0; SIZES[size as usize]];
    fill(key(1_000 * n + chunk).digest(), &mut payload);
    payload
}

/// A tier that holds that version of every chunk.
fn holding(name: &str, arena: &Arc<Arena>, n: u64) -> Box<dyn Tier> {
    let mut tier = MemoryTier::new(MemoryConfig::new(name, 1 << 30));
    for chunk in 0..CHUNKS {
        let slot = arena.try_take().unwrap();
        let id = WriteId::new(n.into());
        let record = Record::encode(slot, &key(chunk), id, &version(chunk, n)).unwrap();
        let op = WriteOp { id: OpId(chunk), record: Arc::new(record) };
        assert!(tier.submit(Op::Write(op), 0).is_ok());
        let mut completions = Vec::new();
        tier.poll(0, &Unguarded, &mut completions);
        assert_eq!(completions.len(), 1);
    }
    Box::new(tier)
}

fn bad_reads(seed: u64) -> FaultPlan {
    FaultPlan::NONE
        .with(FaultKind::ReadFails, When::Probability(0.03))
        .with(FaultKind::ReadIsTruncated, When::Probability(0.01))
        .with(FaultKind::ReadFlipsBit, When::Probability(0.01))
        .with(FaultKind::ReadFindsItDeleted, When::Probability(0.01))
        .with(FaultKind::Stalls { ns: 120_000_000 }, When::Probability(0.05))
        .seeded(seed)
}

/// Three tiers, of which one holds another version of every chunk.
fn differing(seed: u64, cached: u64) -> Rig {
    let tier = |tier| TierConfig::memory(&format!("t{tier}"), ByteSize::gib(1));
    let mut config = Config::new((0..3).map(tier).collect());
    config.engine.chunk_bytes_max = ByteSize(BYTES_MAX);
    config.engine.host_cache = ByteSize(cached * record_bytes(BYTES_MAX));
    config.engine.staging = ByteSize(4 * record_bytes(BYTES_MAX));
    config.engine.read_buffer = Some(ByteSize(12 * record_bytes(BYTES_MAX)));
    config.engine.cache_stores = false;
    config.engine.read_deadline_ms = 60;
    config.engine.step_deadline_ms = 20_000;
    config.engine.write_max_age_ms = 5;
    for tier in &mut config.tiers {
        tier.window = Some(3);
    }
    let bytes = usize::try_from(record_bytes(BYTES_MAX)).unwrap();
    let arena = Arena::new(ArenaConfig::new(bytes, 1)).unwrap();
    let (mut tiers, mut faults) = (Vec::new(), Vec::new());
    for (at, (n, bytes_per_s)) in
        [(1, 500 << 20), (2, 400 << 20), (1, 100 << 20)].into_iter().enumerate()
    {
        let inner = holding(&config.tiers[at].name, &arena, n);
        let paced = Throttled::new(inner, ThrottleConfig::new(bytes_per_s));
        let faulty = Faulty::new(Box::new(paced), bad_reads(seed + 10 * at as u64));
        faults.push(faulty.handle());
        tiers.push(Box::new(faulty) as Box<dyn Tier>);
    }
    let arenas = Engine::arenas(&config).unwrap();
    Rig { engine: Engine::with_tiers(config, arenas, tiers).unwrap(), faults }
}

/// Loads some chunks, some of them twice, some into memory of another length. Every hit must be one version, whole.
fn load_some(engine: &Engine, versions: &[Vec<Vec<u8>>], random: &mut fastrand::Rng) -> (u64, u64) {
    let known = keys(0..CHUNKS);
    let wanted: Vec<usize> =
        (0..random.usize(1..=5)).map(|_| random.usize(0..known.len())).collect();
    let length = |chunk: usize, random: &mut fastrand::Rng| {
        let n = [0, 0, 0, 1, 2][random.usize(0..5)];
        if random.u8(..) < 16 { SIZES[random.usize(0..4)] } else { versions[chunk][n].len() }
    };
    let mut buffers: Vec<_> = wanted.iter().map(|at| vec![0xee; length(*at, random)]).collect();
    let some: Vec<ChunkKey> = wanted.iter().map(|at| known[*at].clone()).collect();
    let lease = engine.lookup(if random.bool() { &some } else { &[] });
    let mut wants: Vec<Want<'_>> =
        some.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    for (want, chunk) in wants.iter().zip(&wanted) {
        let whole = versions[*chunk].iter().any(|version| version.as_slice() == &*want.dest);
        assert!(whole || !want.outcome.is_hit(), "chunk {chunk} is of no version: {report:?}");
    }
    assert_eq!(report.hits() + report.misses(), report.wanted);
    (report.hits(), report.tiers.iter().map(|tier| tier.mixed_pieces).sum())
}

#[test]
fn a_chunk_whose_replicas_differ_is_delivered_as_one_of_them() {
    let versions: Vec<Vec<Vec<u8>>> =
        (0..CHUNKS).map(|chunk| (1..=3).map(|n| version(chunk, n)).collect()).collect();
    for seed in seeds(2) {
        println!("KVBRAID_SEED={seed}");
        let Rig { engine, faults } = differing(seed, 2 * (seed % 2));
        let load_often = |thread: u64| {
            let mut random = fastrand::Rng::with_seed(100 * seed + thread);
            let some = (0..25).map(|_| load_some(&engine, &versions, &mut random));
            some.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
        };
        let (hits, mixed) = thread::scope(|scope| {
            let loads: Vec<_> =
                (0..2).map(|thread| scope.spawn(move || load_often(thread))).collect();
            // What a tier lost is stored again, as something else.
            while !loads.iter().all(|load| load.is_finished()) {
                for (chunk, versions) in versions.iter().enumerate() {
                    let _ = engine.store(&key(chunk as u64), &versions[2]);
                }
                thread::sleep(Duration::from_millis(3));
            }
            let sums = loads.into_iter().map(|load| load.join().unwrap());
            sums.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
        });
        println!("{hits} hits, {mixed} pieces that did not fit");
        assert!(hits > 0 && mixed > 0, "nothing was tried: {:#?}", engine.stats());
        faults.iter().for_each(|faults: &FaultHandle| faults.set_plan(FaultPlan::NONE));
        assert_nothing_is_held_but(&engine, 2 * (seed % 2));
    }
}

/// The cache holds on to its slots.
fn assert_nothing_is_held_but(engine: &Engine, cached: u64) {
    let free = wait_for(|| {
        let memory = engine.stats().read_memory;
        memory.free_slots + cached >= memory.bytes / memory.slot_bytes
    });
    assert!(free, "something is still held: {:#?}", engine.stats());
}
