//! Windows that nobody configured: what is shown, where they begin, and that reading on trial disturbs nothing.

use std::{path::Path, thread, time::Duration, time::Instant};

use crate::common::*;
use kv_connector::{ByteSize, Config, Engine, EngineStats, TierConfig, WindowState};
use kv_tiers::{FaultPlan, Faulty, Latency, ThrottleConfig, Throttled};

/// Two tiers of files.
fn on_disk(directory: &Path) -> Config {
    let mut config = config(&[], ByteSize(0));
    for name in ["fast", "slow"] {
        let tier = TierConfig::nvme(name, directory.join(name), ByteSize::mib(64));
        config.tiers.push(tier);
    }
    config
}

fn stats_when(engine: &Engine, is_so: impl Fn(&EngineStats) -> bool) -> EngineStats {
    let until = Instant::now() + SOON;
    loop {
        let stats = engine.stats();
        if is_so(&stats) {
            return stats;
        }
        assert!(Instant::now() < until, "{:?}", stats.tiers);
        thread::sleep(Duration::from_millis(5));
    }
}

fn probed(engine: &Engine) -> EngineStats {
    stats_when(engine, |stats| stats.tiers.iter().all(|tier| tier.window_search.probe.is_some()))
}

#[test]
fn an_empty_store_begins_at_the_default_without_a_probe() {
    let engine = Engine::open(config(&[("m", ByteSize::gib(1))], ByteSize(0))).unwrap();
    let tier = engine.stats().tiers[0].clone();
    let search = tier.window_search;
    assert_eq!((tier.window, search.limit, search.max), (8, 8, 32));
    assert_eq!((search.state, search.probe), (WindowState::Learning, None));
    assert_eq!(engine.stats().read_memory.bytes, 64 * engine.stats().read_memory.slot_bytes);
}

#[test]
fn one_request_keeps_more_than_one_read_in_flight_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = on_disk(directory.path());
    config.tiers.truncate(1);
    config.tiers[0].window = Some(6);
    let keys = keys(0..24);
    fill(&Engine::open(config.clone()).unwrap(), &keys);
    let engine = Engine::open(config).unwrap();
    assert_eq!(engine.stats().tiers[0].in_flight_max, 0);
    assert_eq!(load(&engine, &keys).0.hits(), 24);
    let tier = &engine.stats().tiers[0];
    assert!((2..=6).contains(&tier.in_flight_max), "{tier:?}");
}

#[test]
fn a_fixed_window_is_neither_probed_nor_learned() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = on_disk(directory.path());
    config.tiers.iter_mut().for_each(|tier| tier.window = Some(3));
    let keys = keys(0..24);
    fill(&Engine::open(config.clone()).unwrap(), &keys);
    for _ in 0..2 {
        let engine = Engine::open(config.clone()).unwrap();
        for _ in 0..4 {
            assert_eq!(load(&engine, &keys).0.hits(), 24);
        }
        for tier in engine.stats().tiers {
            let search = tier.window_search;
            assert_eq!((tier.window, search.limit, search.max), (3, 3, 3));
            assert_eq!((search.state, search.probe), (WindowState::Fixed, None));
        }
    }
}

#[test]
fn a_reopened_store_is_probed_within_bounds_and_read_right_afterwards() {
    let directory = tempfile::tempdir().unwrap();
    let keys = keys(0..32);
    fill(&Engine::open(on_disk(directory.path())).unwrap(), &keys);
    let engine = Engine::open(on_disk(directory.path())).unwrap();
    let stats = probed(&engine);
    for tier in &stats.tiers {
        let probe = tier.window_search.probe.as_ref().unwrap();
        assert!((1..=900).contains(&probe.reads), "{probe:?}");
        assert_eq!(probe.bytes, probe.reads * CHUNK_BYTES as u64);
        assert!(["enough", "time", "bytes"].contains(&probe.ended_by), "{probe:?}");
        let begins = probe.window.unwrap_or(8);
        assert!(probe.ended_by != "enough" || tier.window == begins, "{tier:?}");
        assert_eq!((tier.payload_bytes, tier.late_bytes), (0, 0), "nobody wanted those bytes");
    }
    let text = stats.prometheus();
    assert!(text.contains("kvbraid_tier_window_reads{tier=\"fast\"} "), "{text}");
    let (report, _) = load(&engine, &keys);
    assert_eq!((report.hits(), report.storage_hits()), (32, 32));
    assert!(stats_when(&engine, |_| true).read_memory.free_slots > 0);
}

#[test]
fn a_store_opened_empty_is_probed_once_it_holds_enough_and_nobody_wants_anything() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut config = on_disk(directory.path());
    config.tiers[0].window_max = Some(4);
    let engine = Engine::open(config).unwrap();
    fill(&engine, &keys(0..24));
    if !engine.stats().tiers.iter().all(|tier| tier.io_mode.contains("o_direct")) {
        println!("SKIP probing what was just written: no O_DIRECT here");
        return;
    }
    // Four times four chunks are enough for one, four times 31 or so for the other.
    let stats = stats_when(&engine, |stats| stats.tiers[0].window_search.probe.is_some());
    let [fast, slow] = &stats.tiers[..] else { panic!("{stats:?}") };
    let probe = fast.window_search.probe.clone().unwrap();
    assert!((1..=900).contains(&probe.reads), "{probe:?}");
    assert_eq!(probe.bytes, probe.reads * CHUNK_BYTES as u64);
    assert_eq!((&slow.window_search.probe, slow.read_bytes), (&None, 0), "too few chunks");
    let (report, _) = load(&engine, &keys(0..24));
    assert_eq!((report.hits(), report.storage_hits()), (24, 24));
}

/// A tier whose probe would take its whole time: 50 ms a read.
fn slow_tier(directory: &Path, plan: FaultPlan) -> Engine {
    let mut config = config(&[], ByteSize(0));
    config.tiers.push(TierConfig::nvme("slow", directory, ByteSize::mib(64)));
    fill(&Engine::open(config.clone()).unwrap(), &keys(0..16));
    let arenas = arenas(&config);
    let mut pace = ThrottleConfig::new(1 << 30);
    pace.latency = Latency::Fixed { ns: 50_000_000 };
    let mut nvme = kv_tiers::NvmeConfig::new("slow", directory, 64 << 20);
    nvme.payload_bytes_max = 1 << 20;
    let memory = [arenas.reads.clone(), arenas.staging.clone()];
    let tier = kv_tiers::NvmeTier::open(nvme, &memory, kv_connector::now_ns()).unwrap();
    let tier = Throttled::new(Box::new(Faulty::new(Box::new(tier), plan)), pace);
    Engine::with_tiers(config, arenas, vec![Box::new(tier)]).unwrap()
}

#[test]
fn a_step_ends_the_probe_and_is_read_right() {
    let directory = tempfile::tempdir().unwrap();
    let engine = slow_tier(directory.path(), FaultPlan::NONE);
    let (report, _) = load(&engine, &keys(0..16));
    assert_eq!(report.storage_hits(), 16);
    let probe = probed(&engine).tiers[0].window_search.probe.clone().unwrap();
    assert!(["step", "time"].contains(&probe.ended_by), "{probe:?}");
    assert!(engine.stats().tiers[0].window >= 8, "what was seen is not enough for less");
}
