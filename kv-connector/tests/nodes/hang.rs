//! A mount that hangs: the other tier serves everything, and the tier comes back with the mount.

use std::{
    env,
    fs::{self, File, OpenOptions},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{ByteSize, Engine, SharedSection, TierConfig};
use nix::{sys::stat::Mode, unistd::mkfifo};

use crate::common::*;

/// The process that serves the mount, stopped; without one, pipes in the place of chunks, which hang at open.
enum Hang {
    Stopped(String),
    Pipes(Vec<std::path::PathBuf>, Vec<File>),
}

fn signal(pid: &str, name: &str) {
    let status = Command::new("kill").args([name, pid]).status().unwrap();
    assert!(status.success(), "kill {name} {pid}");
}

impl Hang {
    fn begin(store: &std::path::Path, keys: &[ChunkKey]) -> Self {
        if let Ok(pid) = env::var("KVBRAID_TEST_MOUNT_PID") {
            signal(&pid, "-STOP");
            return Self::Stopped(pid);
        }
        let paths: Vec<_> = keys.iter().map(|key| chunk_path(store, key)).collect();
        for path in &paths {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let _ = fs::remove_file(path);
            mkfifo(path, Mode::S_IRWXU).unwrap();
        }
        Self::Pipes(paths, Vec::new())
    }

    fn end(&mut self) {
        match self {
            Self::Stopped(pid) => signal(pid, "-CONT"),
            Self::Pipes(paths, ends) => {
                let open = |path| OpenOptions::new().read(true).write(true).open(path).unwrap();
                ends.extend(std::mem::take(paths).iter().map(open));
            }
        }
    }
}

impl Drop for Hang {
    fn drop(&mut self) {
        if thread::panicking() {
            self.end();
        }
    }
}

#[test]
fn a_mount_that_hangs_costs_the_other_tier_nothing_and_comes_back() {
    let place = Place::new();
    let mut shared = TierConfig::shared("shared", place.first(), ByteSize::gib(1));
    let mut section = SharedSection::default();
    section.hung_after_ms = 300;
    section.absent_ttl_ms = 100;
    shared.shared = Some(section);
    let memory = TierConfig::memory("memory", ByteSize::gib(1));
    let mut config = config(vec![shared, memory]);
    config.engine.read_deadline_ms = 300;
    config.engine.lookup_wait_ms = 50;
    let engine = Engine::open(config).unwrap();
    let (known, unknown) = (keys(0..40), keys(1000..1016));
    store(&engine, &known);
    assert_eq!(load(&engine, &known).hits(), 40);

    let both: Vec<ChunkKey> = known.iter().chain(&unknown).cloned().collect();
    let mut hang = Hang::begin(&place.first(), &both);
    for _ in 0..4 {
        let report = load(&engine, &known);
        assert_eq!(report.hits(), 40, "{report:?}");
        // What nobody has stored is a miss, with and without the mount.
        assert_eq!(engine.lookup(&unknown).prefix_hits(), 0);
    }
    until("the breaker opens", || {
        load(&engine, &known);
        engine.stats().tiers[0].breaker != "closed"
    });
    // Open, the tier is not even asked.
    assert_eq!(load(&engine, &known).tiers[0].hits, 0);
    assert_eq!(engine.lookup(&both).prefix_hits(), 40);

    hang.end();
    until("the breaker closes", || {
        load(&engine, &known);
        engine.stats().tiers[0].breaker == "closed"
    });
    assert_eq!(load(&engine, &known).hits(), 40);
    assert_eq!(engine.lookup(&unknown).prefix_hits(), 0);
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}
