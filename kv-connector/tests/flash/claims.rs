//! Claims: recorded while a request waits, staged before it is read, within the budget, given up in every state.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{
    ByteSize, ClaimStatus, Config, Engine, FlashPolicy, FlashSection, LoadQueue, QueueSection,
    Wanted,
};

use crate::common::{CHUNK_BYTES, config, directory, fill, keys, load, locked_bytes, payload_of};

const HOUR: Duration = Duration::from_secs(3600);
const NOW: Option<Duration> = Some(Duration::ZERO);

pub(crate) fn claims(engine: &Engine) -> ClaimStatus {
    engine.stats().tiers[0].claims.clone().unwrap()
}

/// Waits until the claims satisfy `done`.
pub(crate) fn until(engine: &Engine, done: impl Fn(&ClaimStatus) -> bool) -> ClaimStatus {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let status = claims(engine);
        if done(&status) {
            return status;
        }
        assert!(Instant::now() < end, "{status:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn with(config: &mut Config, change: impl FnOnce(&mut FlashSection)) {
    let mut section = FlashSection::default();
    change(&mut section);
    config.tiers[0].flash = Some(section);
}

pub(crate) fn opened(
    change: impl FnOnce(&mut FlashSection),
) -> (tempfile::TempDir, Engine, Vec<ChunkKey>) {
    let directory = directory();
    let mut config = config(&directory.path().join("flash"));
    with(&mut config, change);
    let engine = Engine::open(config).unwrap();
    let keys = keys(0..16);
    fill(&engine, &keys);
    (directory, engine, keys)
}

#[test]
fn a_claim_costs_nothing_until_its_time_and_is_ready_when_it_is_read() {
    let (_directory, engine, keys) = opened(|_| {});
    let claimed = engine.claim("r", &keys[..4], Some(HOUR));
    assert_eq!((claimed.chunks, claimed.refused), (4, false));
    assert!(claimed.bytes >= 4 * CHUNK_BYTES as u64);
    std::thread::sleep(Duration::from_millis(60));
    let status = claims(&engine);
    assert_eq!((status.states["recorded"], status.recorded), (1, 1));
    assert_eq!((status.reserved_bytes, status.protected_bytes, status.c_gib_s), (0, 0, 0.0));
    assert!(engine.revise("r", NOW));
    let status = until(&engine, |status| status.states["ready"] == 1);
    assert_eq!(status.reserved_bytes, claimed.bytes);
    assert_eq!(status.staged_chunks, 4);
    assert_eq!(load(&engine, &keys[..4]).0.hits(), 4);
    let status = until(&engine, |status| status.protected_bytes == 0);
    assert_eq!((status.early, status.late, status.demand), (1, 0, 0));
    assert_eq!((status.protected_chunks, status.demand_chunks, status.released), (4, 0, 1));
    assert!(status.c_gib_s > 0.0 && status.reserved_bytes == 0, "{status:?}");
    assert_eq!(engine.stats().chunks_leased, 0);
}

#[test]
fn what_is_not_ready_is_read_through_the_flash() {
    let (_directory, engine, keys) = opened(|_| {});
    engine.claim("r", &keys[..4], Some(HOUR));
    assert_eq!(load(&engine, &keys[..4]).0.hits(), 4);
    let status = claims(&engine);
    assert_eq!((status.late, status.demand, status.demand_chunks), (1, 1, 4));
    assert_eq!((status.released, status.protected_chunks, status.staged_chunks), (1, 0, 0));
}

#[test]
fn a_claim_ends_when_the_last_of_its_chunks_was_read_by_anybody() {
    let (_directory, engine, keys) = opened(|_| {});
    engine.claim("short", &keys[..2], Some(HOUR));
    engine.claim("long", &keys[..4], Some(HOUR));
    engine.claim("other", &keys[4..6], Some(HOUR));
    load(&engine, &keys[..3]);
    let status = claims(&engine);
    assert_eq!((status.released, status.states["recorded"]), (1, 2));
    load(&engine, &keys[2..4]);
    let status = claims(&engine);
    assert_eq!((status.released, status.states["recorded"]), (2, 1));
    assert!(!engine.cancel("short") && !engine.cancel("long") && engine.cancel("other"));
}

#[test]
fn protected_bytes_never_exceed_the_budget_and_nobody_waits_for_ever() {
    let budget = ByteSize::mib(5);
    let (_directory, engine, keys) = opened(|section| {
        section.protected_bytes = Some(budget);
        section.policy = FlashPolicy::Immediate;
    });
    for (n, keys) in keys.chunks(2).enumerate() {
        engine.claim(&n.to_string(), keys, None);
    }
    until(&engine, |status| status.states["ready"] == 2 && status.blocked == 6);
    for (n, keys) in keys.chunks(2).enumerate() {
        let status = until(&engine, |status| status.ready > n as u64);
        assert!(status.protected_bytes_max <= budget.0 && status.reserved_bytes <= budget.0);
        assert_eq!(load(&engine, keys).0.hits(), 2);
    }
    let status = until(&engine, |status| status.protected_bytes == 0);
    assert_eq!((status.released, status.demand), (8, 0), "{status:?}");
    assert!(status.protected_bytes_max <= budget.0 && status.reserved_bytes_max <= budget.0);
}

#[test]
fn what_is_larger_than_the_budget_is_read_all_the_same() {
    let (_directory, engine, keys) =
        opened(|section| section.protected_bytes = Some(ByteSize::mib(2)));
    engine.claim("large", &keys[..8], NOW);
    engine.claim("small", &keys[8..9], NOW);
    until(&engine, |status| status.states["ready"] == 1 && status.blocked == 1);
    assert_eq!(load(&engine, &keys[..9]).0.hits(), 9);
    let status = until(&engine, |status| status.released == 2);
    assert_eq!((status.protected_chunks, status.demand_chunks), (1, 8));
}

#[test]
fn a_cancelled_claim_gives_its_protection_back_in_every_state() {
    let (_directory, engine, keys) = opened(|_| {});
    engine.claim("waits", &keys[..4], Some(HOUR));
    engine.claim("ready", &keys[4..8], NOW);
    until(&engine, |status| status.states["ready"] == 1);
    for round in 0..30 {
        assert!(engine.cancel("waits"));
        // Cancelled while it is about to be staged, is being staged, or was.
        engine.claim("waits", &keys[..8], NOW);
        std::thread::sleep(Duration::from_micros(200 * round));
    }
    assert!(engine.cancel("waits") && engine.cancel("ready") && !engine.cancel("waits"));
    let status = until(&engine, |status| status.protected_bytes == 0 && status.released == 32);
    assert_eq!((status.reserved_bytes, status.refused), (0, 0));
    assert_eq!(engine.stats().chunks_leased, 0);
}

#[test]
fn more_claims_than_allowed_are_refused_and_counted() {
    let (_directory, engine, keys) = opened(|section| section.claims_max = 2);
    assert!(!engine.claim("one", &keys[..1], Some(HOUR)).refused);
    assert!(!engine.claim("two", &keys[..1], Some(HOUR)).refused);
    assert!(engine.claim("three", &keys[..1], Some(HOUR)).refused);
    assert_eq!(engine.claim("none", &[], NOW).chunks, 0);
    assert!(engine.cancel("one"));
    assert!(!engine.claim("three", &keys[..1], Some(HOUR)).refused);
    assert_eq!(claims(&engine).refused, 1);
}

#[test]
fn a_claim_goes_with_its_lease_or_with_the_next_one_of_its_request() {
    let (_directory, engine, keys) = opened(|_| {});
    let lease = engine.lookup_for("r", &keys[..4], NOW);
    assert_eq!(lease.prefix_hits(), 4);
    until(&engine, |status| status.states["ready"] == 1);
    let second = engine.lookup_for("r", &keys[4..6], Some(HOUR));
    until(&engine, |status| status.states["ready"] == 0 && status.states["recorded"] == 1);
    drop(lease);
    assert!(engine.revise("r", Some(HOUR)), "the first lease has nothing to do with it");
    drop(second);
    assert!(!engine.revise("r", None));
    let status = until(&engine, |status| status.released == 2);
    assert_eq!((status.cancelled, status.reserved_bytes), (2, 0));
}

#[test]
fn a_claim_that_nobody_touches_expires() {
    let (_directory, engine, keys) = opened(|section| section.claim_deadline_ms = 1_000);
    engine.claim("r", &keys[..2], NOW);
    let status = until(&engine, |status| status.expired == 1 && status.protected_bytes == 0);
    assert_eq!((status.cancelled, status.released), (1, 1));
    assert!(!engine.cancel("r"));
}

#[test]
fn without_a_hint_the_queue_says_when_a_claim_is_used() {
    let (_directory, engine, keys) = opened(|section| section.margin_ms = Some(0));
    for (n, keys) in keys.chunks(2).enumerate() {
        engine.claim(&n.to_string(), keys, None);
    }
    // Nothing is known of the pace before the first two were read, so all are early.
    for some in keys.chunks(2) {
        assert_eq!(load(&engine, some).0.hits(), 2);
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = until(&engine, |status| status.released == 8);
    assert!(status.protected_chunks > 0, "{status:?}");
}

#[test]
fn nothing_is_locked_after_the_end() {
    let (directory, engine, keys) = opened(|_| {});
    engine.claim("r", &keys[..8], NOW);
    let status = until(&engine, |status| status.states["ready"] == 1);
    if status.protection == "hard" {
        assert!(locked_bytes(directory.path()) >= 8 * CHUNK_BYTES as u64);
    } else {
        eprintln!("SKIP locked pages: this process may not lock memory");
    }
    let report = engine.close(Duration::from_secs(20));
    assert!(report.drained && report.leaked_threads == 0);
    assert_eq!(locked_bytes(directory.path()), 0);
    assert!(engine.claim("late", &keys[..1], None).refused);
    assert!(!engine.revise("r", None) && !engine.cancel("r"));
}

#[test]
fn claims_show_in_metrics_and_in_json() {
    let (_directory, engine, keys) = opened(|_| {});
    engine.claim("r", &keys[..4], Some(HOUR));
    load(&engine, &keys[..4]);
    engine.claim("q", &keys[..2], Some(HOUR));
    let stats = engine.stats();
    let text = stats.prometheus();
    for line in [
        "kvbraid_claims{tier=\"f\",state=\"recorded\"} 1",
        "kvbraid_claims_total{tier=\"f\",event=\"demand\"} 1",
        "kvbraid_claims_total{tier=\"f\",event=\"recorded\"} 2",
        "kvbraid_claim_demand_chunks_total{tier=\"f\"} 4",
        "kvbraid_claim_protected_byte_seconds_total{tier=\"f\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "no `{line}` in\n{text}");
    }
    let json = serde_json::to_value(&stats).unwrap();
    let claims = &json["tiers"][0]["claims"];
    assert_eq!((&claims["policy"], &claims["late"]), (&"tempo_q".into(), &1.into()));
}

#[test]
fn a_queued_load_ends_a_claim_when_its_chunks_have_landed() {
    let (_directory, engine, keys) = opened(|_| {});
    let engine = Arc::new(engine);
    let queue = LoadQueue::new(Arc::clone(&engine), &QueueSection::default()).unwrap();
    engine.claim("r", &keys[..4], NOW);
    until(&engine, |status| status.states["ready"] == 1);
    let wants = keys[..4].iter().map(|key| Wanted::new(key.clone(), CHUNK_BYTES)).collect();
    let fetch = queue.submit(wants);
    let end = Instant::now() + Duration::from_secs(30);
    let hits = loop {
        let taken = fetch.take(|place, bytes| assert!(bytes == payload_of(&keys[place])));
        if let Some(hits) = taken {
            break hits;
        }
        assert!(Instant::now() < end);
        fetch.wait(Duration::from_millis(100));
    };
    assert_eq!(hits, [true; 4]);
    let status = until(&engine, |status| status.released == 1 && status.protected_bytes == 0);
    assert_eq!((status.protected_chunks, status.early, status.late), (4, 1, 0));
}

#[test]
fn kvbraid_stat_shows_claims() {
    let directory = directory();
    let (path, file) = (directory.path().join("flash"), directory.path().join("kvbraid.toml"));
    let socket = directory.path().join("engine.sock");
    let text = format!(
        "[engine]\nchunk_bytes_max = \"1 MiB\"\nhost_cache = 0\nstaging = \"16 MiB\"\nsocket = {socket:?}\n\
         [[tier]]\nname = \"f\"\nkind = \"flash\"\npath = {path:?}\ncapacity = \"64 MiB\"\n"
    );
    std::fs::write(&file, &text).unwrap();
    let engine = Engine::open(Config::from_toml(&text).unwrap()).unwrap();
    fill(&engine, &keys(0..4));
    engine.claim("r", &keys(0..4), Some(HOUR));
    let stat = |more: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvbraid"));
        let output = command.args(["stat", more, "--config"]).arg(&file).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let shown = stat("--prometheus");
    assert!(shown.contains("kvbraid_claims{tier=\"f\",state=\"recorded\"} 1"), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&stat("--json")).unwrap();
    assert_eq!(json["tiers"][0]["claims"]["states"]["recorded"], 1, "{json}");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvbraid"));
    let output = command.args(["stat", "--config"]).arg(&file).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    for words in ["1 (recorded 1)", "1 recorded, 0 ready", "of 16.0 MiB (tempo_q by times, "] {
        assert!(shown.contains(words), "no `{words}` in\n{shown}");
    }
}
