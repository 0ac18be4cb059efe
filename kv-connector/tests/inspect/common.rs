//! Engines over directories, the command, and damage.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use kv_chunk::{ChunkHeader, ChunkKey, HEADER_BYTES};
use kv_connector::{
    Config, Engine, Stored, Want,
    replay::{fill, wrong_bytes},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::testing::namespace;

pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) const PAYLOAD_BYTES: usize = 3 << 19;

/// Chunk `n` of a model and a tenant.
pub(crate) fn key(model: &str, salt: &str, n: u64) -> ChunkKey {
    ChunkKey::new(&namespace(model), 0, 0, &n.to_le_bytes(), salt.as_bytes()).unwrap()
}

pub(crate) fn keys(model: &str, salt: &str, count: u64) -> Vec<ChunkKey> {
    (0..count).map(|n| key(model, salt, n)).collect()
}

/// A directory with a configuration of two tiers of files, and one in memory.
pub(crate) struct Place {
    pub(crate) root: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self { root: tempfile::tempdir().unwrap() };
        place.configure("");
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Writes the configuration; `more` goes into its `[engine]`.
    pub(crate) fn configure(&self, more: &str) {
        let tier = |name: &str| {
            let path = self.path(name);
            let path = path.display();
            format!("[[tier]]\nname = \"{name}\"\nkind = \"nvme\"\npath = \"{path}\"\n")
                + "capacity = \"64 MiB\"\nsegment = \"8 MiB\"\n"
        };
        let text = format!(
            "[engine]\nchunk_bytes_max = \"2 MiB\"\nhost_cache = \"8 MiB\"\nstaging = \"32 MiB\"\n\
             write_max_age_ms = 10\n{more}\n{}{}[[tier]]\nname = \"memory\"\nkind = \"memory\"\ncapacity = \"64 MiB\"\n",
            tier("one"),
            tier("two")
        );
        fs::write(self.path("kvbraid.toml"), text).unwrap();
    }

    pub(crate) fn config(&self) -> Config {
        Config::from_file(&self.path("kvbraid.toml")).unwrap()
    }

    pub(crate) fn engine(&self) -> Engine {
        Engine::open(self.config()).unwrap()
    }

    /// An engine stores these and ends.
    pub(crate) fn filled_with(&self, keys: &[ChunkKey]) {
        let engine = self.engine();
        store(&engine, keys);
        assert!(engine.close(SOON).drained);
    }

    /// Runs `kvbraid ARGUMENTS --config F`.
    pub(crate) fn kvbraid(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_kvbraid"))
            .args(arguments)
            .arg("--config")
            .arg(self.path("kvbraid.toml"))
            .output()
            .unwrap()
    }

    /// Its exit code, and what it printed as JSON.
    #[track_caller]
    pub(crate) fn json(&self, arguments: &[&str]) -> (i32, Value) {
        let output = self.kvbraid(&[arguments, &["--json"]].concat());
        let value = serde_json::from_slice(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap(), value.unwrap_or_else(|_| panic!("{error}")))
    }

    /// Everything in a tier's directory but who holds its lock.
    pub(crate) fn contents(&self, tier: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let files = fs::read_dir(self.path(tier)).unwrap().map(|entry| entry.unwrap().path());
        let files = files.filter(|path| !path.ends_with("LOCK"));
        files.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    }

    /// Where a chunk's record begins on the medium, whatever the files look like.
    pub(crate) fn record_of(&self, tier: &str, key: &ChunkKey) -> (PathBuf, u64) {
        for (path, bytes) in self.contents(tier) {
            for at in (0..bytes.len().saturating_sub(HEADER_BYTES)).step_by(4096) {
                if ChunkHeader::parse(&bytes[at..]).is_ok_and(|it| it.verify_key(key).is_ok()) {
                    return (path, at as u64);
                }
            }
        }
        panic!("{key:?} is not in {tier}");
    }

    /// Flips a bit so many bytes behind the beginning of a record.
    pub(crate) fn flip(&self, tier: &str, key: &ChunkKey, offset: u64) {
        let (path, at) = self.record_of(tier, key);
        flip(&path, at + offset);
    }
}

pub(crate) fn edit(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn flip(path: &Path, at: u64) {
    let (file, mut byte) = (edit(path), [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

pub(crate) fn payload(key: &ChunkKey) -> Vec<u8> {
    let mut payload = vec![0; PAYLOAD_BYTES];
    fill(key.digest(), &mut payload);
    payload
}

/// Stores and waits until every tier has them.
pub(crate) fn store(engine: &Engine, keys: &[ChunkKey]) {
    for keys in keys.chunks(6) {
        for key in keys {
            assert_eq!(engine.store(key, &payload(key)), Stored::Staged);
        }
        assert!(engine.flush(SOON).drained, "{:#?}", engine.stats());
    }
}

/// Which of them are served, every byte checked.
pub(crate) fn served(engine: &Engine, keys: &[ChunkKey]) -> Vec<bool> {
    let lease = engine.lookup(keys);
    let mut buffers = vec![vec![0; PAYLOAD_BYTES]; keys.len()];
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    engine.load(&lease, &mut wants);
    for want in wants.iter().filter(|want| want.outcome.is_hit()) {
        assert_eq!(wrong_bytes(want.key.digest(), want.dest), 0);
    }
    wants.iter().map(|want| want.outcome.is_hit()).collect()
}
