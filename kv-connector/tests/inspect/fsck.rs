//! `kvbraid fsck`.

use std::{fs, os::unix::fs::FileExt, time::Instant};

use kv_connector::inspect::{CheckOptions, Offline, check};

use crate::common::*;

fn tier(report: &serde_json::Value, index: usize) -> &serde_json::Value {
    &report["tiers"][index]
}

#[test]
fn a_clean_store_is_said_to_be_clean_and_no_byte_of_it_changes() {
    let place = Place::new();
    place.filled_with(&keys("m", "", 10));
    let before = (place.contents("one"), place.contents("two"));
    let (code, report) = place.json(&["fsck"]);
    assert_eq!(code, 0, "{report}");
    for index in 0..2 {
        let tier = tier(&report, index);
        assert_eq!((&tier["chunks"], &tier["whole_chunks"]), (&10.into(), &10.into()), "{tier}");
        assert_eq!(tier["whole_bytes"], 10 * PAYLOAD_BYTES);
        assert!(tier["used_bytes"].as_u64().unwrap() >= 10 * (PAYLOAD_BYTES as u64), "{tier}");
    }
    assert_eq!(tier(&report, 2)["state"], "volatile");
    assert!((place.contents("one"), place.contents("two")) == before, "a byte changed");
}

#[test]
fn every_kind_of_damage_is_told_apart_and_repair_removes_that_and_nothing_else() {
    let place = Place::new();
    let known = keys("m", "", 12);
    place.filled_with(&known);
    // Payload of the first and of the second block, a header's key, and a header's magic.
    place.flip("one", &known[0], 5_000);
    place.flip("one", &known[1], 4096 + (1 << 20) + 7);
    place.flip("one", &known[2], 200);
    place.flip("one", &known[3], 0);
    let (from, from_at) = place.record_of("one", &known[4]);
    let (to, to_at) = place.record_of("one", &known[5]);
    let mut record = vec![0; 4096 + PAYLOAD_BYTES];
    edit(&from).read_exact_at(&mut record, from_at).unwrap();
    edit(&to).write_all_at(&record, to_at).unwrap();
    fs::write(place.path("one").join("notes.txt"), "somebody's").unwrap();
    let before = place.contents("one");

    let (code, report) = place.json(&["fsck"]);
    let one = tier(&report, 0);
    assert_eq!(code, 1, "{report}");
    let damaged = one["damaged"].as_object().unwrap();
    let count = damaged.values().map(|count| count.as_u64().unwrap()).sum::<u64>()
        + one["torn_slots"].as_u64().unwrap();
    // With the index from the headers, or from a journal that also knows the chunks whose headers are gone.
    assert!((5..=6).contains(&count), "{one}");
    assert_eq!(one["damaged"]["checksum"], 2, "{one}");
    assert_eq!(one["foreign_files"].as_array().unwrap().len(), 1, "{one}");
    assert!(place.contents("one") == before, "without --repair a byte changed");
    assert_eq!(tier(&report, 1)["whole_chunks"], 12, "the other tier is whole: {report}");

    let (code, report) = place.json(&["fsck", "--repair"]);
    let one = tier(&report, 0);
    let removed = ["removed_chunks", "removed_others"].map(|it| one[it].as_u64().unwrap());
    assert_eq!((code, removed.iter().sum::<u64>()), (1, count), "{one}");
    let (code, report) = place.json(&["fsck"]);
    assert_eq!((code, &tier(&report, 0)["whole_chunks"]), (0, &7.into()), "{report}");
    assert_eq!(fs::read(place.path("one").join("notes.txt")).unwrap(), b"somebody's");
    assert_eq!(served(&place.engine(), &known), [true; 12], "the other tier has them");
}

#[test]
fn damaged_files_and_leftovers_are_named_and_repair_removes_the_damaged() {
    let place = Place::new();
    let known = keys("m", "", 12);
    place.filled_with(&known);
    let (path, _) = place.record_of("one", &known[0]);
    let length = fs::metadata(&path).unwrap().len();
    edit(&path).set_len(length - 5_000).unwrap();
    fs::write(place.path("one").join("seg-0000000000000077.kvb.tmp"), [1; 9_000]).unwrap();
    let (code, report) = place.json(&["fsck"]);
    let one = tier(&report, 0);
    assert_eq!((code, one["damaged_files"].as_array().unwrap().len()), (1, 1), "{one}");
    assert!(one["damaged_files"][0].as_str().unwrap().contains(path.to_str().unwrap()), "{one}");
    assert_eq!(one["leftovers"].as_array().unwrap().len(), 1, "{one}");
    assert!(path.exists());
    place.json(&["fsck", "--repair"]);
    let (code, report) = place.json(&["fsck"]);
    assert_eq!(code, 0, "{report}");
    assert!(!path.exists());
    assert_eq!(served(&place.engine(), &known), [true; 12], "the other tier has them");
}

#[test]
fn repairs_below_a_lowered_cap_cost_no_whole_chunk() {
    let place = Place::new();
    let known = keys("m", "", 20);
    place.filled_with(&known);
    place.flip("one", &known[3], 200);
    let text = fs::read_to_string(place.path("kvbraid.toml")).unwrap();
    let lowered = text.replace("capacity = \"64 MiB\"", "capacity = \"16 MiB\"");
    fs::write(place.path("kvbraid.toml"), lowered).unwrap();
    let (code, report) = place.json(&["fsck", "--repair"]);
    let one = tier(&report, 0);
    assert!(code == 1 && one["used_bytes"].as_u64() > one["capacity_bytes"].as_u64(), "{one}");
    let (code, report) = place.json(&["fsck"]);
    assert_eq!((code, &tier(&report, 0)["whole_chunks"]), (0, &19.into()), "{report}");
}

#[test]
fn an_engine_that_runs_is_named_and_nothing_is_read() {
    let place = Place::new();
    let engine = place.engine();
    let output = place.kvbraid(&["fsck"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    let pid = std::process::id().to_string();
    assert!(error.contains(&format!("pid {pid}")) && error.contains("close the engine"), "{error}");
    drop(engine);
    assert_eq!(place.kvbraid(&["fsck"]).status.code(), Some(0));
    assert_eq!(place.kvbraid(&["fsck", "--rate", "0"]).status.code(), Some(2));
}

#[test]
fn a_store_that_was_never_used_is_clean_and_is_not_made() {
    let place = Place::new();
    let (code, report) = place.json(&["fsck", "--repair"]);
    assert_eq!((code, &tier(&report, 0)["state"]), (0, &"absent".into()), "{report}");
    assert!(!place.path("one").exists());
}

#[test]
fn a_rate_holds_and_a_caller_can_stop() {
    let place = Place::new();
    place.filled_with(&keys("m", "", 10));
    let mut offline = Offline::open(place.config()).unwrap();
    let mut options = CheckOptions::default();
    let mut seen = 0;
    let report = check(&mut offline, &options, &mut || {
        seen += 1;
        seen < 5
    });
    assert!(report.as_ref().unwrap().stopped && !report.unwrap().is_clean());
    assert!(seen < 10, "{seen}");
    // 30 MiB in two tiers, at 30 MiB a second: never sooner than that, but for what passes at once.
    options.bytes_per_s = Some(30 << 20);
    let began = Instant::now();
    assert!(check(&mut offline, &options, &mut || true).unwrap().is_clean());
    assert!(began.elapsed().as_millis() > 700, "{:?}", began.elapsed());
}
