//! A real file system that is full, and is filled up in the middle.

use std::time::Duration;

use kv_connector::{ByteSize, Config, Engine, Stored, TierConfig, Want, replay::wrong_bytes};

use crate::{model::Chunks, small_tmpfs::SmallTmpfs};

const SECOND: Duration = Duration::from_secs(1);

fn store(engine: &Engine, chunks: &Chunks, range: std::ops::Range<u64>) {
    for chunk in range {
        let stored = engine.store(&chunks.key(chunk), &chunks.payload(chunk));
        assert!(stored != Stored::Refused(kv_connector::StoreRefusal::Closed));
        engine.flush(SECOND);
    }
}

fn hits(engine: &Engine, chunks: &Chunks, range: std::ops::Range<u64>) -> usize {
    let keys: Vec<_> = range.clone().map(|chunk| chunks.key(chunk)).collect();
    let mut buffers: Vec<_> = range.map(|chunk| vec![0; chunks.bytes_of(chunk)]).collect();
    let lease = engine.lookup(&keys);
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    engine.load(&lease, &mut wants);
    let hits = wants.iter().filter(|want| want.outcome.is_hit());
    hits.inspect(|want| assert_eq!(wrong_bytes(want.key.digest(), want.dest), 0)).count()
}

#[test]
fn a_file_system_that_fills_up_costs_writes_only_and_they_resume_when_there_is_room() {
    let root = tempfile::tempdir().unwrap();
    let Some(mount) = SmallTmpfs::mount(root.path()) else { return };
    let directory = mount.path("tier");
    let mut tier = TierConfig::nvme("small", &directory, ByteSize::mib(64));
    // The cap promises eight times what there is.
    tier.segment = Some(ByteSize::mib(1));
    let mut config = Config::new(vec![tier]);
    config.engine.chunk_bytes_max = ByteSize::kib(128);
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::mib(2);
    config.engine.write_max_age_ms = 1;
    config.engine.write_back_off_ms = 5;
    let chunks = Chunks::new(1, vec![100_000, 30_001], 1_000);
    let engine = Engine::open(config.clone()).unwrap();
    store(&engine, &chunks, 0..30);
    assert_eq!(hits(&engine, &chunks, 0..30), 30);
    mount.fill();
    store(&engine, &chunks, 100..140);
    let stats = &engine.stats().tiers[0];
    assert_eq!(stats.breaker, "closed", "a full medium is no broken one: {stats:?}");
    assert!(hits(&engine, &chunks, 0..140) > 0, "reads stopped, too");
    mount.empty();
    store(&engine, &chunks, 200..220);
    // The last of them were written after the rest that a full medium gives writes.
    store(&engine, &chunks, 220..230);
    assert_eq!(hits(&engine, &chunks, 220..230), 10, "{:#?}", engine.stats());
    // And by itself: more than the medium holds.
    store(&engine, &chunks, 300..500);
    assert!(hits(&engine, &chunks, 300..500) > 20, "{:#?}", engine.stats());
    assert!(engine.close(10 * SECOND).drained);
    let engine = Engine::open(config).unwrap();
    assert!(hits(&engine, &chunks, 0..500) > 20);
}
