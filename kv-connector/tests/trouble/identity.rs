//! Whose bytes they are: keys, ranks, namespaces, tenants, and one directory for one engine.

use std::thread;

use kv_chunk::{ChunkKey, Namespace};
use kv_connector::{
    ByteSize, Engine, EngineError, MissReason, Outcome, Stored, ThrottleSection, Want,
};

use crate::common::*;

type Change = fn(&mut Namespace);

/// Every way in which two runs can differ.
const CHANGES: [(&str, Change); 14] = [
    ("model", |it| it.model.push('x')),
    ("weights", |it| it.weights.push('x')),
    ("dtype", |it| it.dtype = "fp8_e4m3".to_owned()),
    ("layout", |it| it.layout = "HND".to_owned()),
    ("chunk_tokens", |it| it.chunk_tokens += 1),
    ("serde", |it| it.serde = "cachegen".to_owned()),
    ("hash_algorithm", |it| it.hash_algorithm = "sha256".to_owned()),
    ("hash_seed", |it| it.hash_seed.push('1')),
    ("tensor_parallel", |it| it.tensor_parallel += 1),
    ("pipeline_parallel", |it| it.pipeline_parallel += 1),
    ("context_parallel", |it| it.context_parallel += 1),
    ("engine", |it| it.engine.push('x')),
    ("engine_major", |it| it.engine_major += 1),
    ("extra", |it| drop(it.extra.insert("lora".to_owned(), "a".to_owned()))),
];

#[test]
fn a_chunk_of_another_model_dtype_layout_or_parallel_shape_is_a_miss() {
    let Rig { engine, .. } = rig(config(2));
    let mine = key(1);
    fill_tiers(&engine, std::slice::from_ref(&mine));
    for (field, change) in CHANGES {
        let mut namespace = namespace();
        change(&mut namespace);
        let theirs = ChunkKey::new(&namespace, 0, 0, &1_u64.to_le_bytes(), b"").unwrap();
        assert_is_a_miss(&engine, &theirs, field);
    }
}

#[test]
fn ranks_groups_and_tenants_share_no_chunk() {
    let Rig { engine, .. } = rig(config(2));
    let hash = 1_u64.to_le_bytes();
    let key = |rank, group, salt: &[u8]| ChunkKey::new(&namespace(), rank, group, &hash, salt);
    let mine = key(0, 0, b"tenant a").unwrap();
    fill_tiers(&engine, std::slice::from_ref(&mine));
    for (what, theirs) in [
        ("rank", key(1, 0, b"tenant a")),
        ("object group", key(0, 1, b"tenant a")),
        ("tenant", key(0, 0, b"tenant b")),
        ("no tenant", key(0, 0, b"")),
    ] {
        assert_is_a_miss(&engine, &theirs.unwrap(), what);
    }
    assert!(all_hit(&load(&engine, &[mine]).1));
}

fn assert_is_a_miss(engine: &Engine, key: &ChunkKey, what: &str) {
    let lease = engine.lookup(std::slice::from_ref(key));
    assert_eq!(lease.hits(), [false], "{what} does not separate chunks");
    let (_, outcomes) = load(engine, std::slice::from_ref(key));
    assert_eq!(outcomes, [Outcome::Miss(MissReason::NotHeld)], "{what}");
}

#[test]
fn a_store_has_copied_its_bytes_when_it_returns() {
    let Rig { engine, .. } = rig(config(2));
    let key = key(1);
    let mut source = payload(&key);
    assert_eq!(engine.store(&key, &source), Stored::Staged);
    // The caller's blocks are its own again: preemption may give them to another request.
    source.fill(0);
    assert!(all_hit(&load(&engine, std::slice::from_ref(&key)).1));
    assert!(engine.flush(PATIENCE).drained);
    assert!(all_hit(&load(&engine, &[key]).1));
}

#[test]
fn a_second_engine_on_one_directory_is_refused_and_the_first_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let config = || file_config(root.path(), 1, ByteSize::mib(64));
    let engine = Engine::open(config()).unwrap();
    fill_tiers(&engine, &keys(0..3));
    match Engine::open(config()) {
        Err(EngineError::Tier { name, .. }) => assert_eq!(name, "t0"),
        other => panic!("{other:?}"),
    }
    assert!(all_hit(&load(&engine, &keys(0..3)).1));
    drop(engine);
    let engine = Engine::open(config()).unwrap();
    assert!(all_hit(&load(&engine, &keys(0..3)).1));
}

#[test]
fn two_sessions_that_take_turns_in_few_slots_never_get_each_others_bytes() {
    let root = tempfile::tempdir().unwrap();
    let mut config = file_config(root.path(), 2, ByteSize::mib(32));
    config.engine.read_buffer = Some(ByteSize(8 * ((5 << 19) + 4096)));
    let engine = Engine::open(config).unwrap();
    thread::scope(|scope| {
        for session in 0..3 {
            let engine = &engine;
            // Each session pages its own chunks in and out; there is room for a part of all.
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(session);
                for _ in 0..12 {
                    let own = (0..6).map(|_| session * 100 + random.u64(0..12));
                    let own = keys(own.collect::<Vec<_>>());
                    load(engine, &own);
                    for key in &own {
                        let _ = engine.store(key, &payload(key));
                    }
                }
            });
        }
    });
    assert!(engine.flush(PATIENCE).drained);
    assert_nothing_is_held(&engine);
}

#[test]
fn a_chunk_that_is_evicted_while_it_is_read_is_right_or_a_miss() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::open(file_config(root.path(), 1, ByteSize::mib(16))).unwrap();
    thread::scope(|scope| {
        let flood = scope.spawn(|| {
            for first in (0..120).step_by(4) {
                for key in keys(first..first + 4) {
                    let _ = engine.store(&key, &payload(&key));
                }
                engine.flush(PATIENCE);
            }
        });
        // Without a lease nothing protects them but the tier's own rule for reads.
        let nothing_leased = engine.lookup(&[]);
        let mut random = fastrand::Rng::with_seed(1);
        while !flood.is_finished() {
            let wanted: Vec<u64> = (0..8).map(|_| random.u64(0..120)).collect();
            let keys = keys(wanted);
            let mut buffers: Vec<_> = keys.iter().map(|key| vec![0; bytes_of(key)]).collect();
            let mut wants: Vec<_> =
                keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
            let report = engine.load(&nothing_leased, &mut wants);
            assert_honest(&report, &wants);
        }
    });
    assert!(engine.stats().tiers[0].evictions > 0, "nothing was evicted");
}

#[test]
fn two_copies_of_a_chunk_that_differ_are_never_mixed() {
    const BYTES: usize = (6 << 20) + 5;
    let root = tempfile::tempdir().unwrap();
    let both = || {
        let mut config = file_config(root.path(), 2, ByteSize::mib(64));
        config.engine.chunk_bytes_max = ByteSize::mib(7);
        config
    };
    // Recomputed after one tier lost it: each tier holds another version under the same key.
    let known = keys(0..4);
    for version in [0_u8, 1] {
        let mut config = both();
        config.tiers = vec![config.tiers.swap_remove(usize::from(version))];
        let engine = Engine::open(config).unwrap();
        for key in &known {
            assert_eq!(engine.store(key, &vec![version; BYTES]), Stored::Staged);
        }
        assert!(engine.flush(PATIENCE).drained);
    }
    // Slow enough that the tiers share what is left, in pieces.
    let mut config = both();
    for (tier, mb_per_s) in config.tiers.iter_mut().zip([200, 150]) {
        tier.throttle = Some(ThrottleSection::new(ByteSize(mb_per_s * 1_000_000)));
    }
    let engine = Engine::open(config).unwrap();
    for round in 0..12 {
        let known = &known[..1 + round % 4];
        let lease = engine.lookup(known);
        let mut buffers = vec![vec![9; BYTES]; known.len()];
        let mut wants: Vec<_> =
            known.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
        let report = engine.load(&lease, &mut wants);
        assert_eq!(report.hits(), known.len() as u64, "{report:?}");
        for want in &wants {
            let version = want.dest[0];
            assert!(version < 2 && want.dest.iter().all(|byte| *byte == version), "mixed");
        }
    }
}
