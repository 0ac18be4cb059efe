//! Fresh directories for a run, removed when it ends.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use crate::{Config, replay::ReplayError};

const PREFIX: &str = "kvbraid-replay-";
const LOCK: &str = "replay.lock";

/// One fresh directory in every directory that a configuration names, so that a replay neither sees nor evicts what a
/// serving engine keeps there. Dropping it removes them.
///
/// A process that was killed cannot tidy up: the next replay in the same place removes what it left.
#[derive(Debug)]
pub struct Scratch {
    config: Config,
    made: Vec<Directory>,
}

impl Scratch {
    /// Makes the directories and a copy of `config` that names them, without its socket.
    pub fn new(config: &Config) -> Result<Self, ReplayError> {
        let mut scratch = Self { config: config.clone(), made: Vec::new() };
        scratch.config.engine.socket = None;
        for tier in &mut scratch.config.tiers {
            let Some(base) = tier.path.clone() else { continue };
            sweep(&base);
            let path = base.join(format!("{PREFIX}{:016x}", fastrand::u64(..)));
            let made = Directory::new(path.clone())
                .map_err(|source| ReplayError::Scratch { path: path.clone(), source })?;
            tier.path = Some(made.tier());
            scratch.made.push(made);
        }
        Ok(scratch)
    }

    /// The configuration over the fresh directories.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

/// A directory with a locked file beside what the tier keeps in it: while the lock is held, its replay lives.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    _lock: File,
}

impl Directory {
    fn new(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let made = File::create_new(path.join(LOCK)).and_then(|lock| {
            lock.try_lock()?;
            Ok(Self { path: path.clone(), _lock: lock })
        });
        made.inspect_err(|_| remove(&path))
    }

    fn tier(&self) -> PathBuf {
        self.path.join("tier")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path) {
        tracing::warn!(path = %path.display(), %error, "cannot remove a replay's directory");
    }
}

/// Removes what replays that no longer run left in `base`.
fn sweep(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // A replay that is just being made has no lock file yet: left alone, as is one that holds its lock.
        let lock = File::open(entry.path().join(LOCK));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            remove(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{ByteSize, TierConfig};

    use super::*;

    #[test]
    fn directories_are_fresh_and_removed_with_the_run() {
        let base = tempfile::tempdir().unwrap();
        let kept = base.path().join("segments");
        fs::create_dir_all(&kept).unwrap();
        let config = Config::new(vec![
            TierConfig::nvme("a", base.path(), ByteSize::gib(1)),
            TierConfig::memory("b", ByteSize::gib(1)),
        ]);
        let scratch = Scratch::new(&config).unwrap();
        let path = scratch.config().tiers[0].path.clone().unwrap();
        assert!(path.starts_with(base.path()) && path.parent().unwrap().is_dir());
        assert_eq!(scratch.config().tiers[1].path, None);
        drop(scratch);
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1, "only `segments` is left");
    }

    #[test]
    fn what_a_killed_replay_left_is_removed_and_a_living_one_is_not() {
        let base = tempfile::tempdir().unwrap();
        let config = Config::new(vec![TierConfig::nvme("a", base.path(), ByteSize::gib(1))]);
        let dead = base.path().join(format!("{PREFIX}dead"));
        fs::create_dir_all(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        let living = Scratch::new(&config).unwrap();
        assert!(!dead.exists());
        let other = Scratch::new(&config).unwrap();
        assert!(living.made[0].path.exists() && other.made[0].path.exists());
    }
}
