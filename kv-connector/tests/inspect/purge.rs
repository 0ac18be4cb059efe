//! `kvbraid purge`, and the engine's own.

use std::{
    fs,
    process::{Child, Command, Stdio},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use kv_connector::{
    Engine,
    inspect::{PurgeRefusal, PurgeRequest, Selector},
};

use crate::common::*;

fn request(selector: Selector, wait: Duration) -> PurgeRequest {
    let mut request = PurgeRequest::new(selector);
    request.wait_ms = u64::try_from(wait.as_millis()).unwrap();
    request
}

#[test]
fn only_what_is_selected_goes_and_it_stays_away() {
    let place = Place::new();
    let [mine, other, tenant] =
        [("m", ""), ("n", ""), ("m", "tenant")].map(|(model, salt)| keys(model, salt, 6));
    place.filled_with(&[mine.clone(), other.clone(), tenant.clone()].concat());
    let before = place.contents("one");
    let (code, report) = place.json(&["purge", "--model", "m", "--dry-run"]);
    assert_eq!((code, &report["tiers"][0]["matched_chunks"]), (1, &12.into()), "{report}");
    assert!(place.contents("one") == before, "a dry run changed a byte");
    let (code, report) = place.json(&["purge", "--model", "m", "--salt", "tenant"]);
    assert_eq!((code, &report["tiers"][0]["removed_chunks"]), (0, &6.into()), "{report}");
    let engine = place.engine();
    assert_eq!(served(&engine, &[mine.clone(), other.clone()].concat()), [true; 12]);
    assert_eq!(served(&engine, &tenant), [false; 6]);
    drop(engine);
    let (code, report) = place.json(&["purge", "--model", "m"]);
    assert_eq!((code, &report["tiers"][1]["removed_chunks"]), (0, &6.into()), "{report}");
    let engine = place.engine();
    assert_eq!((served(&engine, &mine), served(&engine, &other)), (vec![false; 6], vec![true; 6]));
    drop(engine);
    let (code, report) = place.json(&["purge", "--model", "m", "--dry-run"]);
    assert_eq!((code, &report["tiers"][0]["matched_chunks"]), (0, &0.into()), "{report}");
    assert_eq!(place.json(&["fsck"]).0, 0);
}

#[test]
fn chunks_whose_owner_cannot_be_told_are_counted_and_left() {
    let place = Place::new();
    let known = keys("m", "", 6);
    place.filled_with(&known);
    place.flip("one", &known[0], 200);
    let (_, report) = place.json(&["purge", "--model", "n"]);
    let one = &report["tiers"][0];
    // With the index from the headers it is not even named.
    let unknown = one["unknown_chunks"].as_u64().unwrap();
    assert_eq!(one["chunks"].as_u64().unwrap(), 5 + unknown, "{one}");
    assert_eq!(one["matched_chunks"], 0, "{one}");
}

#[test]
fn a_purge_needs_a_model_or_a_salt() {
    let place = Place::new();
    assert_eq!(place.kvbraid(&["purge"]).status.code(), Some(2));
    let refused = place.engine().purge(&PurgeRequest::default());
    assert_eq!(refused.unwrap_err(), PurgeRefusal::Nothing);
}

#[test]
fn a_running_engine_purges_through_its_socket_and_goes_on_serving_the_rest() {
    let place = Place::new();
    let socket = place.path("engine.sock");
    place.configure(&format!("socket = \"{}\"", socket.display()));
    let engine = place.engine();
    let (mine, other) = (keys("m", "", 8), keys("n", "", 8));
    store(&engine, &[mine.clone(), other.clone()].concat());
    // Into the host cache.
    served(&engine, &mine[..4]);
    let (code, report) = place.json(&["purge", "--model", "m", "--dry-run"]);
    assert_eq!((code, &report["tiers"][2]["matched_chunks"]), (1, &8.into()), "{report}");
    let (code, report) = place.json(&["purge", "--model", "m"]);
    assert_eq!(code, 0, "{report}");
    for tier in report["tiers"].as_array().unwrap() {
        assert_eq!(
            (&tier["removed_chunks"], &tier["complete"]),
            (&8.into(), &true.into()),
            "{tier}"
        );
    }
    assert!(report["host_cache_chunks"].as_u64() > Some(0), "{report}");
    assert_eq!(served(&engine, &mine), [false; 8]);
    assert_eq!(served(&engine, &other), [true; 8]);
    assert_eq!(engine.lookup(&mine).prefix_hits(), 0);
    let purged: u64 = engine.stats().tiers.iter().map(|tier| tier.purged_chunks).sum();
    assert_eq!(purged, 24);
    // What is stored later is not its concern.
    store(&engine, &mine[..2]);
    assert_eq!(served(&engine, &mine[..2]), [true; 2]);
}

#[test]
fn leased_chunks_are_left_and_counted_or_removed_when_they_are_released() {
    let place = Place::new();
    let engine = place.engine();
    let mine = keys("m", "", 6);
    store(&engine, &mine);
    let lease = engine.lookup(&mine[..2]);
    let report = engine.purge(&request(Selector::model("m"), Duration::ZERO)).unwrap();
    assert!(!report.complete);
    for tier in &report.tiers {
        let counts = (tier.matched_chunks, tier.removed_chunks, tier.leased_chunks);
        assert_eq!(counts, (6, 4, 2), "{tier:?}");
    }
    assert_eq!(served(&engine, &mine), [true, true, false, false, false, false]);
    let meet = Barrier::new(2);
    thread::scope(|scope| {
        let purge = scope.spawn(|| {
            meet.wait();
            engine.purge(&request(Selector::model("m"), SOON)).unwrap()
        });
        meet.wait();
        // Longer or shorter, it waits for the release.
        thread::sleep(Duration::from_millis(50));
        drop(lease);
        let report = purge.join().unwrap();
        assert!(report.complete, "{report:?}");
    });
    assert_eq!(served(&engine, &mine), [false; 6]);
}

#[test]
fn loads_and_stores_during_a_purge_are_right_and_none_of_it_is_left() {
    let place = Place::new();
    let engine = place.engine();
    let (mine, other) = (keys("m", "t", 12), keys("n", "t", 12));
    store(&engine, &[mine.clone(), other.clone()].concat());
    let done = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    served(&engine, &mine);
                    assert_eq!(served(&engine, &other), [true; 12]);
                }
            });
        }
        let report = engine.purge(&request(Selector::model("m"), SOON)).unwrap();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(report.complete, "{report:?}");
    });
    assert_eq!(served(&engine, &mine), [false; 12]);
    assert!(served(&engine, &other).iter().all(|hit| *hit));
}

#[test]
fn an_engine_that_closes_ends_its_purge() {
    let place = Place::new();
    let engine = place.engine();
    let mine = keys("m", "", 4);
    store(&engine, &mine);
    let _lease = engine.lookup(&mine);
    let began = Instant::now();
    thread::scope(|scope| {
        let purge = scope.spawn(|| engine.purge(&request(Selector::model("m"), SOON * 10)));
        thread::sleep(Duration::from_millis(100));
        engine.close(SOON);
        if let Ok(report) = purge.join().unwrap() {
            assert!(!report.complete, "{report:?}");
        }
    });
    assert!(began.elapsed() < SOON * 5, "the purge went on");
}

const CHILD: &str = "KVBRAID_PURGE_CHILD";

/// In a child of this program: purges, says so, and waits to be killed.
#[test]
fn what_was_purged_is_gone_after_a_kill() {
    if let Some(root) = std::env::var_os(CHILD) {
        let place = std::path::Path::new(&root);
        let config = kv_connector::Config::from_file(&place.join("kvbraid.toml")).unwrap();
        let engine = Engine::open(config).unwrap();
        let report = engine.purge(&request(Selector::model("m"), SOON)).unwrap();
        assert!(report.complete, "{report:?}");
        fs::write(place.join("purged"), "").unwrap();
        thread::sleep(SOON * 10);
    }
    for round in 0..3 {
        let place = Place::new();
        let (mine, other) = (keys("m", "", 8), keys("n", "", 8));
        place.filled_with(&[mine.clone(), other.clone()].concat());
        let mut child = child(&place);
        let began = Instant::now();
        while !place.path("purged").exists() {
            assert!(child.try_wait().unwrap().is_none() && began.elapsed() < SOON, "round {round}");
            thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let engine = place.engine();
        assert_eq!(served(&engine, &mine), [false; 8]);
        assert_eq!(served(&engine, &other), [true; 8]);
        assert_eq!(engine.stats().chunks_held, 8);
    }
}

fn child(place: &Place) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "purge::what_was_purged_is_gone_after_a_kill", "--nocapture"])
        .env(CHILD, place.root.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}
