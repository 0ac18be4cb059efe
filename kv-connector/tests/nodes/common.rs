//! Keys, payloads, directories and engines.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use kv_chunk::{ChunkKey, KeySpace};
use kv_connector::{ByteSize, Config, Engine, Outcome, StepReport, Stored, TierConfig, Want};
use tempfile::TempDir;

use crate::testing::namespace;

pub(crate) const CHUNK_BYTES: usize = 48 << 10;
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) fn keys(range: std::ops::Range<u64>) -> Vec<ChunkKey> {
    let space = KeySpace::new(&namespace("nodes")).unwrap();
    range.map(|n| space.key(0, 0, &n.to_le_bytes(), b"").unwrap()).collect()
}

/// Bytes that only this key's chunk has.
pub(crate) fn payload(key: &ChunkKey) -> Vec<u8> {
    let seed = u64::from_le_bytes(*key.digest().to_bytes().first_chunk().unwrap());
    let mut payload = vec![0; CHUNK_BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut payload);
    payload
}

/// A directory as the first and as the second node see it; removed at the end.
pub(crate) struct Place {
    made: TempDir,
    second: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        let made = match env::var_os("KVBRAID_TEST_DIR") {
            Some(directory) => tempfile::tempdir_in(directory),
            None => tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")),
        }
        .unwrap();
        let name = made.path().file_name().unwrap();
        let second = env::var_os("KVBRAID_TEST_DIR_2")
            .map_or_else(|| made.path().to_owned(), |other| PathBuf::from(other).join(name));
        Self { made, second }
    }

    /// Through two mounts, which may keep caches of their own.
    pub(crate) fn is_seen_twice(&self) -> bool {
        self.second != self.made.path()
    }

    pub(crate) fn first(&self) -> PathBuf {
        self.made.path().join("store")
    }

    pub(crate) fn second(&self) -> PathBuf {
        self.second.join("store")
    }
}

pub(crate) fn config(tiers: Vec<TierConfig>) -> Config {
    let mut config = Config::new(tiers);
    config.engine.chunk_bytes_max = ByteSize(CHUNK_BYTES as u64);
    config.engine.host_cache = ByteSize(0);
    config.engine.cache_stores = false;
    config.engine.staging = ByteSize::mib(8);
    config.engine.lookup_wait_ms = 30_000;
    config
}

/// A node whose only tier is the shared directory.
pub(crate) fn node(path: &Path) -> Engine {
    let mut shared = TierConfig::shared("shared", path, ByteSize::gib(1));
    shared.write_window = 8;
    Engine::open(config(vec![shared])).unwrap()
}

/// Offers all chunks, waiting when staging is full, and has them written.
pub(crate) fn store(engine: &Engine, keys: &[ChunkKey]) {
    for key in keys {
        while let Stored::Refused(reason) = engine.store(key, &payload(key)) {
            assert!(engine.flush(SOON).drained, "{reason:?}");
        }
    }
    assert!(engine.flush(SOON).drained);
}

/// Looks up and loads; every byte of every hit is compared.
pub(crate) fn load(engine: &Engine, keys: &[ChunkKey]) -> StepReport {
    let lease = engine.lookup(keys);
    let mut buffers = vec![vec![0; CHUNK_BYTES]; keys.len()];
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    let outcomes: Vec<Outcome> = wants.iter().map(|want| want.outcome).collect();
    for ((key, buffer), outcome) in keys.iter().zip(&buffers).zip(outcomes) {
        assert!(!outcome.is_hit() || *buffer == payload(key), "wrong bytes for {key:?}");
    }
    report
}

/// Files below a directory whose names end in `end`.
pub(crate) fn files(directory: &Path, end: &str) -> usize {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| match path.is_dir() {
            true => files(&path, end),
            false => usize::from(path.to_str().unwrap().ends_with(end)),
        })
        .sum()
}

pub(crate) fn chunk_path(store: &Path, key: &ChunkKey) -> PathBuf {
    let name = key.digest().to_string();
    store.join(&name[..3]).join(format!("{name}.kvc"))
}
