//! A shared file system without room.

use kv_connector::{ByteSize, Engine, StoreRefusal, Stored, TierConfig};

use crate::{common::*, small_tmpfs::SmallTmpfs};

/// Stores one after the other, whatever becomes of each.
fn offer(engine: &Engine, keys: &[kv_chunk::ChunkKey]) {
    for key in keys {
        assert_ne!(engine.store(key, &payload(key)), Stored::Refused(StoreRefusal::Closed));
        assert!(engine.flush(SOON).drained);
    }
}

#[test]
fn a_full_shared_file_system_costs_writes_only_leaves_nothing_half_written_and_resumes() {
    let root = tempfile::tempdir().unwrap();
    let Some(mount) = SmallTmpfs::mount(root.path()) else { return };
    let store = mount.path("store");
    let mut tier = TierConfig::shared("shared", &store, ByteSize::mib(64));
    tier.write_window = 4;
    let mut config = config(vec![tier]);
    config.engine.write_back_off_ms = 5;
    config.engine.lookup_wait_ms = 5_000;
    let (engine, other) =
        (Engine::open(config.clone()).unwrap(), Engine::open(config.clone()).unwrap());
    let keys = keys(0..120);
    offer(&engine, &keys[..30]);
    assert_eq!(load(&engine, &keys[..30]).hits(), 30);
    mount.fill();
    offer(&engine, &keys[30..60]);
    let tier = &engine.stats().tiers[0];
    assert!(tier.errors.get("write_no_space").is_some_and(|count| *count > 0), "{tier:?}");
    assert_eq!(tier.breaker, "closed", "a full medium is no broken one: {tier:?}");
    assert_eq!(load(&engine, &keys[..30]).hits(), 30, "reads stopped, too");
    assert_eq!(files(&store, ".tmp"), 0, "half a chunk was left");
    // Nothing that was not written is found, here or by another node.
    let found = load(&other, &keys[..60]).hits();
    assert_eq!(found, files(&store, ".kvc") as u64);
    // A node that starts now reads as well.
    let late = Engine::open(config).unwrap();
    assert_eq!(load(&late, &keys[..60]).hits(), found);
    drop(late);
    mount.empty();
    offer(&engine, &keys[60..64]);
    // The last of them were written after the rest that a full medium gives writes.
    offer(&engine, &keys[64..74]);
    assert_eq!(load(&engine, &keys[64..74]).hits(), 10, "{:#?}", engine.stats());
    assert_eq!(load(&other, &keys[64..74]).hits(), 10);
}
