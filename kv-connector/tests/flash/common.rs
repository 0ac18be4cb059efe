//! Engines over a file that stands for flash, and chunks whose bytes follow from their keys.

use std::{path::Path, time::Duration};

use kv_chunk::ChunkKey;
use kv_connector::{ByteSize, Config, Engine, Outcome, StepReport, Stored, TierConfig, Want};
use tempfile::TempDir;

pub(crate) use crate::testing::key;

pub(crate) const CHUNK_BYTES: usize = 1 << 20;
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) fn keys(range: std::ops::Range<u64>) -> Vec<ChunkKey> {
    range.map(key).collect()
}

/// Bytes that only this key's chunk has.
pub(crate) fn payload_of(key: &ChunkKey) -> Vec<u8> {
    let seed = u64::from_le_bytes(*key.digest().to_bytes().first_chunk().unwrap());
    let mut payload = vec![0; CHUNK_BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut payload);
    payload
}

/// On a disk: the page cache of a memory file system is the file itself.
pub(crate) fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// One flash tier of 64 MiB, nothing cached above it.
pub(crate) fn config(path: &Path) -> Config {
    let mut config = Config::new(vec![TierConfig::flash("f", path, ByteSize::mib(64))]);
    config.engine.chunk_bytes_max = ByteSize::mib(1);
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::mib(16);
    config.engine.cache_stores = false;
    config
}

/// Stores the chunks of `keys` and waits until they are on the tier.
pub(crate) fn fill(engine: &Engine, keys: &[ChunkKey]) {
    for some in keys.chunks(4) {
        for key in some {
            assert_eq!(engine.store(key, &payload_of(key)), Stored::Staged);
        }
        assert!(engine.flush(SOON).drained);
    }
}

/// Loads `keys` and checks every byte of every hit.
pub(crate) fn load(engine: &Engine, keys: &[ChunkKey]) -> (StepReport, Vec<Outcome>) {
    let lease = engine.lookup(keys);
    let mut buffers = vec![vec![0; CHUNK_BYTES]; keys.len()];
    let mut wants: Vec<Want<'_>> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    let outcomes: Vec<Outcome> = wants.iter().map(|want| want.outcome).collect();
    for ((key, buffer), outcome) in keys.iter().zip(&buffers).zip(&outcomes) {
        assert!(!outcome.is_hit() || *buffer == payload_of(key), "wrong bytes for {key:?}");
    }
    (report, outcomes)
}

/// Locked bytes of mappings of files in `directory`: other tests of this process have theirs.
pub(crate) fn locked_bytes(directory: &Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut ours, mut sum) = (false, 0);
    for line in maps.lines() {
        if let Some((range, _)) = line.split_once(' ').filter(|(word, _)| !word.ends_with(':')) {
            ours = range.contains('-') && line.contains(directory.to_str().unwrap());
        }
        if let Some(kib) = line.strip_prefix("Locked:").filter(|_| ours) {
            sum += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        }
    }
    sum
}
