//! Closing, restarting, leases under pressure, several threads, the socket.

use std::{
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use kv_connector::{
    ByteSize, Config, Engine, EngineError, Event, MissReason, Observer, Outcome, Source,
    StoreRefusal, Stored, TierConfig,
};

use crate::common::*;

fn one_tier(capacity: ByteSize) -> Config {
    config(&[("only", capacity)], ByteSize(0))
}

#[test]
fn closing_writes_what_is_staged_and_refuses_what_comes_later() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = nvme_config(directory.path());
    config.engine.write_max_age_ms = 3_600_000;
    let engine = Engine::open(config.clone()).unwrap();
    engine.forward_ended();
    for key in keys(0..8) {
        assert_eq!(engine.store(&key, &payload_of(&key, CHUNK_BYTES)), Stored::Staged);
    }
    let closed = engine.close(SOON);
    assert_eq!((closed.drained, closed.abandoned_chunks, closed.leaked_threads), (true, 0, 0));
    let key = key(100);
    assert_eq!(engine.store(&key, b"late"), Stored::Refused(StoreRefusal::Closed));
    assert_eq!(engine.lookup(&keys(0..8)).prefix_hits(), 0);
    assert_eq!(load(&engine, &keys(0..1)).1, [Outcome::Miss(MissReason::Closed)]);
    assert!(engine.close(SOON).drained, "closing twice is harmless");

    let again = Engine::open(config).unwrap();
    let (report, _) = load(&again, &keys(0..8));
    assert_eq!(report.storage_hits(), 8);
    assert!(again.stats().tiers.iter().all(|tier| tier.recovered_chunks == 8));
}

fn nvme_config(directory: &std::path::Path) -> Config {
    let tier = |name: &str| {
        let mut tier = TierConfig::nvme(name, directory.join(name), ByteSize::mib(16));
        tier.segment = Some(ByteSize::mib(4));
        tier
    };
    let mut config = Config::new(vec![tier("fast"), tier("slow")]);
    config.engine.chunk_bytes_max = ByteSize::mib(1);
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::mib(16);
    config
}

#[test]
fn files_survive_a_restart_and_the_cap_holds_over_runs() {
    let directory = tempfile::tempdir().unwrap();
    for run in 0..3_u64 {
        let engine = Engine::open(nvme_config(directory.path())).unwrap();
        let new = keys(run * 20..run * 20 + 20);
        fill(&engine, &new);
        // Some of the old ones, which were used, may be worth more than some of the new.
        let resident = engine.lookup(&new).hits().iter().filter(|&&hit| hit).count();
        let (report, _) = load(&engine, &new);
        assert_eq!(report.hits(), resident as u64, "{report:?}");
        // Those on probation have a quarter of about 24 places.
        assert!(report.hits() >= 5, "{report:?}");
        let old = keys(0..run * 20);
        let lease = engine.lookup(&old);
        let resident = lease.hits().iter().filter(|&&hit| hit).count();
        drop(lease);
        let (report, _) = load(&engine, &old);
        assert_eq!(report.hits(), resident as u64, "what look-up promises is there");
        for tier in engine.stats().tiers {
            assert!(tier.used_bytes <= tier.capacity_bytes, "{tier:?}");
            assert!(run == 0 || tier.recovered_chunks > 0);
        }
    }
}

#[test]
fn a_directory_serves_one_engine_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let first = Engine::open(nvme_config(directory.path())).unwrap();
    let second = Engine::open(nvme_config(directory.path()));
    assert!(matches!(second, Err(EngineError::Tier { ref name, .. }) if name == "fast"));
    drop(first);
    assert!(Engine::open(nvme_config(directory.path())).is_ok());
}

#[test]
fn leased_chunks_are_all_there_however_many_are_stored_meanwhile() {
    let engine = Engine::open(one_tier(ByteSize::mib(8))).unwrap();
    let leased = keys(0..6);
    fill(&engine, &leased);
    let lease = engine.lookup(&leased);
    assert_eq!((lease.prefix_hits(), engine.stats().chunks_leased), (6, 6));
    for key in keys(100..160) {
        let _ = engine.store(&key, &payload_of(&key, CHUNK_BYTES));
        let _ = engine.flush(SOON);
    }
    assert!(engine.stats().tiers[0].evictions > 20);
    let (_, outcomes) = load(&engine, &leased);
    assert_eq!(outcomes, [Outcome::Hit(Source::Tier(0)); 6]);
    drop(lease);
    assert_eq!(engine.stats().chunks_leased, 0);
    for key in keys(200..220) {
        let _ = engine.store(&key, &payload_of(&key, CHUNK_BYTES));
        let _ = engine.flush(SOON);
    }
    assert_eq!(engine.lookup(&leased).prefix_hits(), 0, "released chunks make room");
}

#[test]
fn chunks_that_only_memory_holds_are_there_while_leased() {
    let mut config = one_tier(ByteSize::mib(4));
    config.engine.host_cache = ByteSize::mib(6);
    let engine = Engine::open(config).unwrap();
    let (first, churn) = (keys(0..2), keys(10..20));
    fill(&engine, &first);
    let _ = load(&engine, &first);
    fill(&engine, &churn);
    assert!(engine.stats().tiers[0].evictions > 0);
    let lease = engine.lookup(&first);
    assert_eq!(lease.prefix_hits(), 2);
    let (_, outcomes) = load(&engine, &first);
    assert_eq!(outcomes, [Outcome::Hit(Source::HostCache); 2], "the tier kept them");
    for _ in 0..2 {
        let _ = load(&engine, &churn);
    }
    assert_eq!(load(&engine, &first).0.hits(), 2);
    drop(lease);
    let _ = load(&engine, &churn);
    assert_eq!(load(&engine, &first).0.hits(), 0, "released, they make room");
}

#[test]
fn events_tell_what_each_tier_holds() {
    let held = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
    let mut config = config(&[("a", ByteSize::mib(6)), ("b", ByteSize::mib(12))], ByteSize(0));
    config.observer = Some(Observer::new({
        let held = Arc::clone(&held);
        move |event| {
            let mut held = held.lock().unwrap();
            let changed = match event {
                Event::Published { digest, tier } => held.insert((digest, tier)),
                Event::Evicted { digest, tier } | Event::Lost { digest, tier } => {
                    held.remove(&(digest, tier))
                }
                other => panic!("{other:?}"),
            };
            assert!(changed, "{event:?} changes nothing");
        }
    }));
    let engine = Engine::open(config).unwrap();
    fill(&engine, &keys(0..30));
    let stats = engine.stats();
    assert!(stats.tiers[0].evictions > 0);
    let counted = |tier| held.lock().unwrap().iter().filter(|(_, t)| *t == tier).count() as u64;
    assert_eq!([counted(0), counted(1)], [stats.tiers[0].chunks, stats.tiers[1].chunks]);
}

#[test]
fn threads_load_and_store_at_once_without_a_wrong_byte() {
    let mut config =
        config(&[("a", ByteSize::mib(24)), ("b", ByteSize::mib(16))], ByteSize::mib(5));
    config.engine.read_buffer = Some(ByteSize::mib(9));
    let engine = Engine::open(config).unwrap();
    fill(&engine, &keys(0..16));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in (100..).take_while(|_| !done.load(Ordering::Relaxed)) {
                let key = key(n);
                let _ = engine.store(&key, &payload_of(&key, CHUNK_BYTES));
            }
        });
        let loaders: Vec<_> = (0..3_u64)
            .map(|thread| {
                let engine = &engine;
                scope.spawn(move || {
                    for round in 0..10 {
                        let first = (thread * 3 + round) % 8;
                        let wanted = keys(first..first + 12);
                        let lease = engine.lookup(&wanted);
                        let promised = lease.hits().iter().filter(|&&hit| hit).count() as u64;
                        let (report, _) = load(engine, &wanted);
                        assert!(report.hits() >= promised, "{report:?}");
                    }
                })
            })
            .collect();
        for loader in loaders {
            loader.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.hits + stats.misses), (30, stats.wanted));
    assert_eq!(stats.chunks_leased, 0);
}

#[test]
fn a_full_staging_memory_refuses_and_recovers() {
    let mut config = one_tier(ByteSize::gib(1));
    config.engine.staging = ByteSize::kib(2304);
    config.engine.write_max_age_ms = 3_600_000;
    let engine = Engine::open(config).unwrap();
    engine.forward_ended();
    let outcomes: Vec<_> =
        keys(0..4).iter().map(|key| engine.store(key, &payload_of(key, CHUNK_BYTES))).collect();
    assert_eq!(outcomes[..2], [Stored::Staged; 2]);
    assert_eq!(outcomes[2..], [Stored::Refused(StoreRefusal::StagingFull); 2]);
    assert_eq!(engine.stats().refused[&StoreRefusal::StagingFull], 2);
    assert!(engine.flush(SOON).drained);
    assert_eq!(engine.store(&key(3), &payload_of(&key(3), CHUNK_BYTES)), Stored::Staged);
}

fn ask(path: &std::path::Path, request: &str) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_socket_answers_the_owner_only_and_goes_with_the_engine() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kvbraid.sock");
    let mut config = one_tier(ByteSize::mib(16));
    config.engine.socket = Some(path.clone());
    let engine = Engine::open(config.clone()).unwrap();
    fill(&engine, &keys(0..3));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let stats: serde_json::Value = serde_json::from_str(&ask(&path, "stats\n")).unwrap();
    assert_eq!((&stats["stored"], &stats["tiers"][0]["chunks"]), (&3.into(), &3.into()));
    assert!(ask(&path, "").contains("\"stored\":3"));
    assert!(ask(&path, "metrics\n").contains("\nkvbraid_stored_chunks_total 3\n"));
    assert!(ask(&path, "anything else\n").contains("error"));
    assert!(ask(&path, &"x".repeat(10_000)).contains("error"));
    // A client that says nothing and reads nothing holds up nobody.
    let _silent: Vec<_> = (0..4).map(|_| UnixStream::connect(&path).unwrap()).collect();
    assert!(ask(&path, "stats\n").contains("\"stored\":3"));

    let second = Engine::open(config.clone()).unwrap_err();
    assert!(matches!(second, EngineError::System { .. }), "{second:?}");
    drop(engine);
    assert!(!path.exists());
    // Of two whose names were taken away from each other, each removes its own.
    let engine = Engine::open(config.clone()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Engine::open(config.clone()).unwrap();
    drop(engine);
    assert!(ask(&path, "stats\n").contains("\"stored\":0"));
    drop(second);
    assert!(!path.exists());
    // What a killed engine left is replaced; a file is not.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    drop(Engine::open(config.clone()).unwrap());
    std::fs::write(&path, b"precious").unwrap();
    assert!(Engine::open(config).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn dropping_an_idle_engine_takes_no_time_to_speak_of() {
    let engine = Engine::open(one_tier(ByteSize::mib(16))).unwrap();
    let closed = engine.close(Duration::from_secs(20));
    assert_eq!((closed.drained, closed.leaked_threads), (true, 0));
}
