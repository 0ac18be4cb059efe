//! The tools over a directory that many nodes share: they look beside whoever works in it, and take nothing from it.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use kv_chunk::{ChunkKey, HEADER_BYTES, block_crc};
use kv_connector::inspect::{CheckOptions, Offline, check};
use serde_json::Value;

use crate::common::*;

/// A place whose only tier of files is a shared directory; `more` goes into `[engine]`.
fn place(more: &str) -> Place {
    let place = Place::new();
    let path = place.path("all");
    let text = format!(
        "[engine]\nchunk_bytes_max = \"2 MiB\"\nhost_cache = \"0\"\nstaging = \"32 MiB\"\nwrite_max_age_ms = 10\n\
         lookup_wait_ms = 20000\n{more}\n[[tier]]\nname = \"all\"\nkind = \"shared\"\npath = \"{}\"\n\
         capacity = \"256 MiB\"\n",
        path.display()
    );
    fs::write(place.path("kvbraid.toml"), text).unwrap();
    place
}

fn file_of(place: &Place, key: &ChunkKey) -> PathBuf {
    let name = key.digest().to_string();
    place.path("all").join(&name[..3]).join(format!("{name}.kvc"))
}

fn flip(path: &Path, at: u64) {
    let (file, mut byte) = (edit(path), [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

/// Of a later version, and whole in its own way.
fn make_later(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[8] = 2;
    bytes[12..16].fill(0);
    let crc = block_crc(&bytes[..HEADER_BYTES]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

/// Every file below, its bytes, and when it was changed.
fn contents(directory: &Path) -> BTreeMap<PathBuf, (i64, i64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            let metadata = fs::metadata(&path).unwrap();
            let file = (metadata.mtime(), metadata.mtime_nsec(), fs::read(&path).unwrap());
            found.insert(path, file);
        }
    }
    found
}

fn names(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|line| line.as_str().unwrap().to_owned()).collect()
}

#[test]
fn stat_shows_what_the_directory_holds_and_changes_nothing() {
    let place = place("");
    let (code, stats) = place.json(&["stat"]);
    assert_eq!((code, &stats["tiers"][0]["state"]), (0, &"absent".into()), "{stats}");
    assert!(!place.path("all").exists());
    place.filled_with(&keys("m", "", 5));
    let before = contents(&place.path("all"));
    let (code, stats) = place.json(&["stat"]);
    let all = &stats["tiers"][0];
    assert_eq!((code, &all["chunks"], &all["state"]), (0, &5.into(), &"opened".into()), "{all}");
    assert_eq!(all["payload_bytes"], 5 * PAYLOAD_BYTES);
    let used = 5 * (PAYLOAD_BYTES as u64 + 4096);
    assert_eq!((&all["used_bytes"], &all["capacity_bytes"]), (&used.into(), &(256 << 20).into()));
    assert!(contents(&place.path("all")) == before, "a byte changed");
}

#[test]
fn fsck_tells_torn_poisoned_and_unfinished_files_apart_and_repair_removes_what_is_provably_bad() {
    let place = place("");
    let known = keys("m", "", 9);
    place.filled_with(&known);
    let file = |n: usize| file_of(&place, &known[n]);
    // Payload of the first and of the second block: poisoned. Header, length and place: torn.
    flip(&file(0), 5_000);
    flip(&file(1), 4096 + (1 << 20) + 7);
    flip(&file(2), 40);
    edit(&file(3)).set_len(10_000).unwrap();
    fs::copy(file(8), file(4)).unwrap();
    make_later(&file(5));
    let fan = file(6).parent().unwrap().to_owned();
    let temporary = fan.join(format!(".{}.0000000000000007-1.tmp", known[6].digest()));
    fs::write(&temporary, [1; 9_000]).unwrap();
    fs::write(place.path("all").join("notes.txt"), "somebody's").unwrap();
    let before = contents(&place.path("all"));

    let (code, report) = place.json(&["fsck"]);
    let all = &report["tiers"][0];
    assert_eq!((code, &all["damaged"]["checksum"]), (1, &2.into()), "{report}");
    let damaged = names(&all["damaged_files"]);
    assert_eq!(damaged.len(), 3, "{damaged:?}");
    for n in 2..5 {
        let path = file(n).display().to_string();
        assert!(damaged.iter().any(|line| line.contains(&path)), "{path} is not in {damaged:?}");
    }
    assert_eq!((&all["newer_chunks"], &all["whole_chunks"]), (&1.into(), &3.into()), "{all}");
    assert!(names(&all["leftovers"])[0].contains(&temporary.display().to_string()), "{all}");
    assert!(names(&all["foreign_files"])[0].contains("notes.txt"), "{all}");
    assert!(contents(&place.path("all")) == before, "without --repair a byte changed");

    let (code, report) = place.json(&["fsck", "--repair"]);
    let all = &report["tiers"][0];
    let removed = (&all["removed_chunks"], &all["removed_others"]);
    assert_eq!((code, removed), (1, (&2.into(), &3.into())), "{all}");
    let after = contents(&place.path("all"));
    let mut gone: Vec<_> = before.keys().filter(|path| !after.contains_key(*path)).collect();
    let mut bad: Vec<_> = (0..5).map(file).collect();
    gone.sort();
    bad.sort();
    assert_eq!(gone, bad.iter().collect::<Vec<_>>());
    assert!(after.iter().all(|(path, file)| before[path] == *file), "a byte changed");
    let (code, report) = place.json(&["fsck"]);
    assert_eq!((code, &report["tiers"][0]["whole_chunks"]), (0, &3.into()), "{report}");
    let text = String::from_utf8(place.kvbraid(&["fsck"]).stdout).unwrap();
    assert!(text.contains("clean") && text.contains("left alone"), "{text}");
}

#[test]
fn fsck_runs_beside_an_engine_and_what_other_nodes_remove_meanwhile_is_no_damage() {
    let place = place("");
    let known = keys("m", "", 12);
    let engine = place.engine();
    store(&engine, &known);
    let (code, report) = place.json(&["fsck", "--repair"]);
    assert_eq!((code, &report["tiers"][0]["whole_chunks"]), (0, &12.into()), "{report}");
    let mut offline = Offline::open(place.config()).unwrap();
    let report = check(&mut offline, &CheckOptions::default(), &mut || {
        known.iter().for_each(|key| drop(fs::remove_file(file_of(&place, key))));
        true
    });
    let report = report.unwrap();
    let all = &report.tiers[0];
    assert!(report.is_clean() && all.changed_chunks > 0, "{report:?}");
    assert_eq!(all.whole_chunks + all.changed_chunks, 12, "{report:?}");
    assert_eq!(served(&engine, &known), [false; 12]);
    store(&engine, &known);
    assert_eq!(served(&engine, &known), [true; 12]);
}

#[test]
fn purge_removes_the_chunks_of_every_node_and_nothing_else() {
    let place = place("");
    let (mine, other) = (keys("m", "", 4), keys("n", "", 4));
    // Two nodes, one after the other.
    place.filled_with(&mine);
    place.filled_with(&other);
    let (code, report) = place.json(&["purge", "--model", "m", "--dry-run"]);
    assert_eq!((code, &report["tiers"][0]["matched_chunks"]), (1, &4.into()), "{report}");
    assert_eq!(served(&place.engine(), &mine), [true; 4], "a dry run removed something");
    let (code, report) = place.json(&["purge", "--model", "m"]);
    let all = &report["tiers"][0];
    assert_eq!((code, &all["removed_chunks"], &all["left_chunks"]), (0, &4.into(), &0.into()));
    assert!(mine.iter().all(|key| !file_of(&place, key).exists()));
    let engine = place.engine();
    assert_eq!((served(&engine, &mine), served(&engine, &other)), (vec![false; 4], vec![true; 4]));
}

#[test]
fn purge_of_a_running_engine_also_removes_what_only_other_nodes_know_of() {
    let socket = "socket = \"engine.sock\"";
    let place = place(socket);
    let text = fs::read_to_string(place.path("kvbraid.toml")).unwrap();
    let path = place.path("engine.sock").display().to_string();
    fs::write(place.path("kvbraid.toml"), text.replace("engine.sock", &path)).unwrap();
    let (theirs, mine, other) = (keys("m", "a", 3), keys("m", "b", 3), keys("n", "", 3));
    place.filled_with(&theirs);
    let engine = place.engine();
    store(&engine, &[mine.clone(), other.clone()].concat());
    let (code, report) = place.json(&["purge", "--model", "m"]);
    assert_eq!((code, &report["tiers"][0]["removed_chunks"]), (0, &3.into()), "{report}");
    assert_eq!(report["directories"]["tiers"][0]["removed_chunks"], 3, "{report}");
    let gone = [theirs, mine].concat();
    assert!(gone.iter().all(|key| !file_of(&place, key).exists()), "{report}");
    assert_eq!((served(&engine, &gone), served(&engine, &other)), (vec![false; 6], vec![true; 3]));
}
