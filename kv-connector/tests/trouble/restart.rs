//! What an engine finds when it opens what another one left.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use kv_connector::{ByteSize, Config, Engine};

use crate::common::*;

fn segments(directory: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|it| it == "kvb")).collect();
    paths.sort();
    assert!(!paths.is_empty());
    paths
}

fn two_tiers(root: &Path) -> Config {
    file_config(root, 2, ByteSize::mib(64))
}

/// Two tiers of files, each with the chunks 0 to 15.
fn left_by_an_earlier_run(root: &Path) {
    let engine = Engine::open(two_tiers(root)).unwrap();
    fill_tiers(&engine, &keys(0..16));
    assert!(engine.close(PATIENCE).drained);
}

#[test]
fn everything_written_is_found_again_and_said_so() {
    let root = tempfile::tempdir().unwrap();
    left_by_an_earlier_run(root.path());
    for _ in 0..3 {
        let engine = Engine::open(two_tiers(root.path())).unwrap();
        let stats = engine.stats();
        assert!(stats.tiers.iter().all(|tier| tier.recovered_chunks == 16), "{stats:#?}");
        assert_eq!(engine.lookup(&keys(0..16)).prefix_hits(), 16);
        for tier in 0..2 {
            assert!(all_hit(&load_from(&engine, &keys(0..16), only(tier)).1));
        }
        // Nothing is written a second time.
        for key in keys(0..16) {
            assert_eq!(engine.store(&key, &payload(&key)), kv_connector::Stored::AlreadyHeld);
        }
        assert_eq!(engine.stats().replicas_written, 0);
    }
}

#[test]
fn space_used_by_an_earlier_run_counts_and_is_evicted_from() {
    let root = tempfile::tempdir().unwrap();
    let capacity = ByteSize::mib(24);
    let config = || file_config(root.path(), 1, capacity);
    let mut used = 0;
    for run in 0..4 {
        let engine = Engine::open(config()).unwrap();
        let before = engine.stats().tiers[0].used_bytes;
        assert!(before >= used, "usage starts anew: {before} after {used}");
        fill_tiers(&engine, &keys(run * 20..run * 20 + 20));
        let tier = &engine.stats().tiers[0];
        assert!(tier.used_bytes <= capacity.0);
        assert!(run == 0 || tier.evictions > 0, "{tier:#?}");
        used = tier.used_bytes;
        drop(engine);
        assert!(disk_bytes(&root.path().join("t0")) <= capacity.0);
    }
}

#[test]
fn a_lowered_cap_holds_from_the_start() {
    let root = tempfile::tempdir().unwrap();
    left_by_an_earlier_run(root.path());
    let mut config = two_tiers(root.path());
    config.tiers[0].capacity = Some(ByteSize::mib(10));
    let engine = Engine::open(config).unwrap();
    let tier = &engine.stats().tiers[0];
    assert!(tier.used_bytes <= 10 << 20, "{tier:#?}");
    assert!(disk_bytes(&root.path().join("t0")) <= 10 << 20);
    assert!(all_hit(&load(&engine, &keys(0..16)).1), "the other tier has them");
}

#[test]
fn deleted_and_truncated_files_are_misses_that_are_forgotten() {
    for seed in seeds(4) {
        println!("KVBRAID_SEED={seed}");
        let root = tempfile::tempdir().unwrap();
        left_by_an_earlier_run(root.path());
        let mut random = fastrand::Rng::with_seed(seed);
        for path in segments(&root.path().join("t0")) {
            let length = fs::metadata(&path).unwrap().len();
            match random.u8(0..3) {
                0 => fs::remove_file(&path).unwrap(),
                1 => {
                    let file = File::options().write(true).open(&path).unwrap();
                    file.set_len(random.u64(0..length)).unwrap();
                }
                _ => {}
            }
        }
        let engine = Engine::open(two_tiers(root.path())).unwrap();
        assert!(all_hit(&load(&engine, &keys(0..16)).1), "the other tier has them");
        load_from(&engine, &keys(0..16), only(0));
        // What missed is named no more: asking again costs nothing.
        let (_, outcomes) = load_from(&engine, &keys(0..16), only(0));
        let masked = kv_connector::Outcome::Miss(kv_connector::MissReason::TierMasked);
        assert!(outcomes.iter().all(|it| it.is_hit() || *it == masked), "{outcomes:?}");
        assert_nothing_is_held(&engine);
    }
}

#[test]
fn files_that_shrink_under_a_running_engine_are_misses_and_the_other_tier_serves() {
    let root = tempfile::tempdir().unwrap();
    let engine = Engine::open(two_tiers(root.path())).unwrap();
    fill_tiers(&engine, &keys(0..16));
    for path in segments(&root.path().join("t0")) {
        File::options().write(true).open(&path).unwrap().set_len(4_096).unwrap();
    }
    assert!(all_hit(&load(&engine, &keys(0..16)).1));
    let (_, outcomes) = load_from(&engine, &keys(0..16), only(0));
    assert!(none_hit(&outcomes), "{outcomes:?}");
    fill_tiers(&engine, &keys(16..20));
    assert!(all_hit(&load(&engine, &keys(0..20)).1));
    assert_nothing_is_held(&engine);
}

#[test]
fn bits_that_rot_between_runs_are_never_served() {
    for seed in seeds(4) {
        println!("KVBRAID_SEED={seed}");
        let root = tempfile::tempdir().unwrap();
        left_by_an_earlier_run(root.path());
        let mut random = fastrand::Rng::with_seed(seed);
        for path in segments(&root.path().join("t0")) {
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let length = file.metadata().unwrap().len();
            for _ in 0..random.u32(1..200) {
                let (at, mut byte) = (random.u64(0..length), [0]);
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ (1 << random.u8(0..8))], at).unwrap();
            }
        }
        let engine = Engine::open(two_tiers(root.path())).unwrap();
        load_from(&engine, &keys(0..16), only(0));
        assert!(all_hit(&load(&engine, &keys(0..16)).1), "the other tier has them");
        fill_tiers(&engine, &keys(16..20));
        assert!(all_hit(&load_from(&engine, &keys(16..20), only(0)).1));
    }
}

#[test]
fn files_that_lost_their_data_after_a_power_cut_are_never_served() {
    let root = tempfile::tempdir().unwrap();
    left_by_an_earlier_run(root.path());
    for (number, path) in (0_u64..).zip(segments(&root.path().join("t0"))) {
        let file = File::options().write(true).open(&path).unwrap();
        let length = file.metadata().unwrap().len();
        // Zeros over the second half, or over everything behind the file's own header.
        let from = if number % 2 == 0 { length / 2 } else { 4_096 };
        file.write_all_at(&vec![0; usize::try_from(length - from).unwrap()], from).unwrap();
    }
    let engine = Engine::open(two_tiers(root.path())).unwrap();
    load_from(&engine, &keys(0..16), only(0));
    assert!(all_hit(&load(&engine, &keys(0..16)).1), "the other tier has them");
    assert_nothing_is_held(&engine);
}
