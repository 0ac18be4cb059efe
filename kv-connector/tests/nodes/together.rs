//! Nodes that store and look for the same chunks.

use std::{
    fs,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{ByteSize, Config, Engine, EngineError, TierConfig, TierId, TierMask, Want};

use crate::common::*;

#[test]
fn two_nodes_storing_1000_equal_chunks_at_once_leave_each_once() {
    let place = Place::new();
    let keys = keys(0..1000);
    let begin = Barrier::new(2);
    // The first makes the directory, so that both begin with the chunks at the same time.
    let (one, other) = (node(&place.first()), node(&place.second()));
    thread::scope(|scope| {
        for engine in [&one, &other] {
            let (keys, begin) = (&keys, &begin);
            scope.spawn(move || {
                begin.wait();
                store(engine, keys);
            });
        }
    });
    assert_eq!(files(&place.first(), ".kvc"), 1000);
    assert_eq!(files(&place.first(), ".tmp"), 0);
    let written = |engine: &Engine| engine.stats().tiers[0].write_bytes;
    let published = (written(&one) + written(&other)) / CHUNK_BYTES as u64;
    if place.is_seen_twice() {
        // Whether `link` of two mounts at one moment refuses the second is the file system's doing. Each chunk is one
        // file, whole, in any case.
        println!("two mounts: {published} chunks published of 1000");
        assert!((1000..1500).contains(&published), "{published} chunks were published");
    } else {
        assert_eq!(published, 1000, "each chunk is published once");
    }

    // Whoever stores them again writes nothing, and whoever looks for them finds them all, whole.
    let third = node(&place.second());
    store(&third, &keys);
    assert_eq!(written(&third), 0);
    let fourth = node(&place.first());
    assert_eq!(fourth.stats().tiers[0].chunks, 0, "nothing is listed at open");
    // A look-up waits for a slow mount no longer than it may: what it has not found by then is a miss, for this time.
    let end = Instant::now() + SOON;
    while fourth.lookup(&keys).hits().contains(&false) {
        assert!(Instant::now() < end, "chunks are not found");
    }
    let report = load(&fourth, &keys);
    assert_eq!(report.hits(), 1000, "{report:?}");
}

#[test]
fn a_chunk_of_another_node_is_found_and_absence_is_a_miss() {
    let place = Place::new();
    let (writer, reader) = (node(&place.first()), node(&place.second()));
    let keys = keys(0..40);
    store(&writer, &keys[..20]);
    let lease = reader.lookup(&keys);
    assert_eq!(lease.prefix_hits(), 20);
    assert_eq!(lease.hits().iter().filter(|hit| **hit).count(), 20);
    drop(lease);
    let report = load(&reader, &keys);
    assert_eq!((report.hits(), report.misses()), (20, 20), "{report:?}");
}

#[test]
fn what_another_node_wrote_is_found_without_waiting_for_the_answer() {
    let place = Place::new();
    let (writer, reader) = (node(&place.first()), node(&place.second()));
    let keys = keys(0..4);
    store(&writer, &keys[..3]);
    assert_eq!(reader.contains(&keys), [false; 4]);
    let seek = reader.seek(&keys).expect("a shared tier may know more");
    let end = std::time::Instant::now() + SOON;
    while !seek.is_done() {
        assert!(std::time::Instant::now() < end, "no answer");
        std::thread::yield_now();
    }
    assert_eq!(reader.contains(&keys), [true, true, true, false]);
    assert!(reader.seek(&keys[..3]).is_none(), "what is known here is not asked for");
}

#[test]
fn a_restarted_node_reads_its_chunks_from_the_shared_directory_as_well() {
    let (place, own) = (Place::new(), Place::new());
    let tiers = || {
        let own = TierConfig::nvme("own", own.first(), ByteSize::gib(1));
        vec![own, TierConfig::shared("shared", place.first(), ByteSize::gib(1))]
    };
    let keys = keys(0..16);
    let engine = Engine::open(config(tiers())).unwrap();
    store(&engine, &keys);
    assert!(engine.close(SOON).drained);

    let engine = Engine::open(config(tiers())).unwrap();
    let begun = Instant::now();
    // Look-ups hit at once, and wait for nothing; some time later each replica is known.
    while load_from(&engine, &keys, TierMask::only(TierId(1))) < keys.len() {
        assert!(begun.elapsed() < SOON, "the second replicas are not found");
        thread::sleep(Duration::from_millis(1));
    }
}

fn load_from(engine: &Engine, keys: &[ChunkKey], tiers: TierMask) -> usize {
    let mut buffers = vec![vec![0; CHUNK_BYTES]; keys.len()];
    let lease = engine.lookup(keys);
    assert!(lease.hits().iter().all(|hit| *hit));
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    wants.iter_mut().for_each(|want| want.tiers = tiers);
    engine.load(&lease, &mut wants);
    for want in wants.iter().filter(|want| want.outcome.is_hit()) {
        assert!(*want.dest == payload(want.key)[..]);
    }
    wants.iter().filter(|want| want.outcome.is_hit()).count()
}

#[test]
fn a_torn_chunk_is_a_miss_everywhere_and_written_again() {
    let place = Place::new();
    let (writer, reader) = (node(&place.first()), node(&place.second()));
    let keys = keys(0..4);
    store(&writer, &keys);
    assert_eq!(load(&reader, &keys).hits(), 4);
    let path = chunk_path(&place.first(), &keys[1]);
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    for engine in [&reader, &writer] {
        let report = load(engine, &keys);
        assert_eq!((report.hits(), report.misses()), (3, 1), "{report:?}");
    }
    store(&writer, &keys);
    assert_eq!(fs::read(&path).unwrap().len(), bytes.len());
    assert_eq!(load(&writer, &keys).hits(), 4);
}

#[test]
fn a_shared_tier_is_configured_by_toml() {
    let place = Place::new();
    let toml = |more: &str| {
        let path = place.first();
        format!(
            "[engine]\nchunk_bytes_max = \"64 KiB\"\nhost_cache = 0\nstaging = \"1 MiB\"\n[[tier]]\nname = \"s\"\nkind = \"shared\"\n\
             path = {path:?}\ncapacity = \"64 MiB\"\n{more}"
        )
    };
    let config = Config::from_toml(&toml("[tier.shared]\ndirectory_mode = \"0750\"\n")).unwrap();
    let engine = Engine::open(config).unwrap();
    assert_eq!(engine.stats().tiers[0].capacity_bytes, 64 << 20);
    for (more, named) in [
        ("[tier.shared]\nfile_mode = \"rw\"\n", "tier[0].shared.file_mode"),
        ("[tier.shared]\ndirectory_mode = \"0500\"\n", "tier[0].shared.directory_mode"),
        ("[tier.shared]\nlease_ttl_ms = 1\n", "tier[0].shared.lease_ttl_ms"),
        ("[tier.shared]\nmode = \"0600\"\n", "mode"),
        ("segment = \"8 MiB\"\n", "tier[0].segment"),
    ] {
        match Config::from_toml(&toml(more)) {
            Err(EngineError::Config { field, .. }) => assert_eq!(field, named),
            other => panic!("{more}: {other:?}"),
        }
    }
    let mut memory = TierConfig::memory("m", ByteSize::gib(1));
    memory.shared = Some(kv_connector::SharedSection::default());
    let error = Config::new(vec![memory]).check().unwrap_err().to_string();
    assert!(error.starts_with("tier[0].shared"), "{error}");
}
