//! An engine on a real Device-DAX device, if `KVBRAID_FLASH` names one (`cargo xtask e2e dax` boots a machine that has one,
//! and kills it while the engine stores); else on a file, with the process killed.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../src/testing.rs"]
mod testing;

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{ByteSize, Config, Engine, Stored, TierConfig, Want};
use kv_cxl::{DeviceDax, DeviceDaxConfig, Medium};

const CHUNK_BYTES: usize = 700_001;
const CHUNKS_MAX: u64 = 40;
const SOON: Duration = Duration::from_secs(60);

fn config(path: &Path) -> Config {
    let mut config = Config::new(vec![TierConfig::flash("f", path, ByteSize::mib(64))]);
    config.engine.chunk_bytes_max = ByteSize::mib(1);
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::mib(16);
    config.engine.cache_stores = false;
    config
}

fn device() -> Option<PathBuf> {
    env::var_os("KVBRAID_FLASH").map(PathBuf::from)
}

fn keys(range: std::ops::Range<u64>) -> Vec<ChunkKey> {
    range.map(testing::key).collect()
}

fn payload(key: &ChunkKey) -> Vec<u8> {
    let seed = u64::from_le_bytes(*key.digest().to_bytes().first_chunk().unwrap());
    let mut payload = vec![0; CHUNK_BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut payload);
    payload
}

fn store(engine: &Engine, key: &ChunkKey) {
    assert_eq!(engine.store(key, &payload(key)), Stored::Staged);
    assert!(engine.flush(SOON).drained);
}

/// Which of them are hits, every byte checked.
fn served(engine: &Engine, keys: &[ChunkKey]) -> Vec<bool> {
    let lease = engine.lookup(keys);
    let mut buffers = vec![vec![0; CHUNK_BYTES]; keys.len()];
    let mut wants: Vec<Want<'_>> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    engine.load(&lease, &mut wants);
    let hits: Vec<bool> = wants.iter().map(|want| want.outcome.is_hit()).collect();
    for ((key, buffer), hit) in keys.iter().zip(&buffers).zip(&hits) {
        assert!(!hit || *buffer == payload(key), "wrong bytes for {key:?}");
    }
    hits
}

/// Another store may stand there.
fn blank(device: &Path) {
    let mut part = DeviceDaxConfig::new(device);
    part.bytes = Some(64 << 20);
    let mut medium = DeviceDax::open(&part).unwrap().medium();
    medium.write(0, &[0; 4096]).unwrap();
}

#[test]
fn an_engine_stores_claims_and_reads_on_a_device() {
    let Some(path) = device() else {
        println!("SKIP an engine on a device: there is no Device-DAX device (KVBRAID_FLASH)");
        return;
    };
    blank(&path);
    let mut odd = config(&path);
    odd.tiers[0].capacity = Some(ByteSize((64 << 20) + (64 << 10)));
    let refused = Engine::open(odd).unwrap_err();
    let text = format!("{refused}: {}", std::error::Error::source(&refused).unwrap());
    assert!(text.contains("alignment 2097152") && text.contains("use 67108864 or"), "{text}");
    let engine = Engine::open(config(&path)).unwrap();
    let keys = keys(0..12);
    keys.iter().for_each(|key| store(&engine, key));
    assert_eq!(engine.claim("r", &keys[..4], Some(Duration::ZERO)).chunks, 4);
    let end = Instant::now() + SOON;
    while engine.stats().tiers[0].claims.clone().unwrap().states["ready"] == 0 {
        assert!(Instant::now() < end, "{:?}", engine.stats().tiers[0].claims);
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(served(&engine, &keys), [true; 12]);
    let claims = engine.stats().tiers[0].claims.clone().unwrap();
    assert_eq!((claims.protection, claims.staged_chunks, claims.released), ("none", 4, 1));
}

/// Stores until it is killed, and says after each chunk that it is on the tier. A part of the test below, run by itself.
#[test]
fn store_until_killed() {
    let Some(path) = env::var_os("KVBRAID_FLASH_STORE") else { return };
    let path = Path::new(&path);
    if device().is_some() {
        blank(path);
    }
    let engine = Engine::open(config(path)).unwrap();
    for number in 0..CHUNKS_MAX {
        store(&engine, &testing::key(number));
        // One of another claim is staged all the time.
        engine.claim("r", &keys(number / 2..number + 1), Some(Duration::ZERO));
        // Not by a macro: the test's output is kept back till its end, and this one has none.
        writeln!(io::stdout(), "STORED {number}").unwrap();
    }
    thread::sleep(SOON);
}

/// What was said to be stored is found and right, and the engine goes on.
fn check_recovered(path: &Path, last_stored: u64) {
    let engine = Engine::open(config(path)).unwrap();
    let stored = keys(0..last_stored + 1);
    assert!(engine.stats().tiers[0].recovered_chunks > last_stored);
    assert!(served(&engine, &stored).iter().all(|hit| *hit));
    // One of which nothing was said is whole or absent.
    served(&engine, &keys(last_stored + 1..CHUNKS_MAX));
    let another = testing::key(1000);
    store(&engine, &another);
    assert_eq!(engine.claim("r", &stored, Some(Duration::ZERO)).chunks, last_stored + 1);
    assert_eq!(served(&engine, &[another]), [true]);
    assert!(served(&engine, &stored).iter().all(|hit| *hit));
}

#[test]
fn what_an_engine_had_stored_before_a_kill_is_found_again() {
    if let (Some(path), Ok(last)) = (device(), env::var("KVBRAID_FLASH_STORED")) {
        // The whole machine was killed, and has booted again.
        check_recovered(&path, last.parse().unwrap());
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("flash");
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "store_until_killed"])
        .env("KVBRAID_FLASH_STORE", &path)
        .env_remove("KVBRAID_FLASH")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut stored = lines.map_while(Result::ok).filter_map(|line| {
        let (_, number) = line.rsplit_once("STORED ")?;
        number.parse::<u64>().ok()
    });
    let last = stored.find(|number| *number >= 20);
    child.kill().unwrap();
    child.wait().unwrap();
    check_recovered(&path, last.unwrap());
}
