//! Starts the child, kills it, and looks at what it left.

use std::{
    collections::BTreeSet,
    env, fs,
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kv_chunk::{ChunkKey, Digest};
use kv_connector::{Engine, Outcome, TierId, TierMask, Want, replay::wrong_bytes};
use tempfile::TempDir;

use crate::{
    CHILD, child,
    ledger::{self, Ledger},
    store::{self, Room, SHARED, TIERS, key, payload_bytes},
};

/// Then the stores start afresh, so that any number of kills fits the disk.
const KILLS_PER_STORE: u64 = 10;
/// A child that notes nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// One pair of stores and what became of it so far.
struct Stores {
    root: TempDir,
    room: Room,
    /// First chunk that the next child stores.
    first: u64,
}

#[derive(Default)]
struct Seen {
    required: u64,
    hits: u64,
    given_up: u64,
}

pub(crate) fn run(kills: u64, seed: u64) {
    println!("{kills} kills, KVBRAID_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut stores: Vec<Stores> = Vec::new();
    let mut seen = Seen::default();
    for kill in 0..kills {
        if kill % (2 * KILLS_PER_STORE) == 0 {
            let fresh = |room| Stores { root: tempfile::tempdir().unwrap(), room, first: 0 };
            stores = [Room::Ample, Room::Tight].map(fresh).into();
        }
        let stores = &mut stores[usize::from(kill % 2 == 1)];
        println!("kill {kill}, {} room", stores.room.name());
        kill_one(stores, &mut random);
        check(stores, &mut seen);
    }
    println!(
        "{} replicas were required, {} hits checked, {} replicas had been given up",
        seen.required, seen.hits, seen.given_up
    );
    assert!(seen.required > 0 && seen.hits > 0, "the children did nothing");
    assert!(seen.given_up > 0 || kills < 2, "nothing was ever evicted");
}

fn kill_one(stores: &mut Stores, random: &mut fastrand::Rng) {
    let path = store::ledger_path(stores.root.path());
    let before = ledger::notes(&path);
    let until = before + random.u64(1..400);
    let mut child = start(stores, random.u64(..));
    // By the count of its notes, sometimes a moment later: also between notes, also while it opens.
    let early = random.u8(0..8) == 0;
    let extra = Duration::from_micros(random.u64(0..30_000));
    let started = Instant::now();
    while !early && ledger::notes(&path) < until {
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        assert!(started.elapsed() < PATIENCE, "the child hangs");
        thread::sleep(Duration::from_micros(500));
    }
    thread::sleep(extra);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn start(stores: &Stores, seed: u64) -> Child {
    let test = "what_was_published_survives_a_kill_and_nothing_else_is_served";
    Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, stores.root.path())
        .env(child::ROOM, stores.room.name())
        .env(child::FIRST, stores.first.to_string())
        .env(child::SEED, seed.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn check(stores: &mut Stores, seen: &mut Seen) {
    let (root, room) = (stores.root.path(), stores.room);
    let path = store::ledger_path(root);
    let required = ledger::required(&path);
    seen.given_up += ledger::notes(&path) - required.len() as u64;
    let chunks: Vec<u64> = (0..room.chunks()).collect();
    let digests: BTreeSet<Digest> = chunks.iter().map(|&chunk| key(chunk).digest()).collect();
    assert!(required.iter().all(|(_, digest)| digests.contains(digest)));
    check_cap(root, room, "as the kill left it");

    // The lock went with the process: this opens at once.
    let engine = child::open(store::config(root, room), &Arc::new(Ledger::open(&path)));
    check_cap(root, room, "reopened");
    for tier in 0..TIERS {
        for chunks in chunks.chunks(32) {
            seen.hits += check_chunks(&engine, tier, chunks, &path);
        }
    }
    seen.required += required.len() as u64;
    check_stats(&engine, root, &required);
    await_shared_cap(root, room);
    let stored =
        |chunk: &&u64| (0..TIERS).any(|tier| required.contains(&(tier, key(**chunk).digest())));
    // Some that were stored are stored again: they were not published.
    stores.first = chunks.iter().rev().find(stored).map_or(0, |last| last + 1);
    assert!(engine.close(Duration::from_secs(20)).drained);
    check_cap(root, room, "closed");
}

/// Loads what that tier alone must deliver. A shared directory's chunks are found by look-ups; those of chunks that other
/// tiers hold, too, wait for no answer.
fn check_chunks(engine: &Engine, tier: u8, chunks: &[u64], ledger: &Path) -> u64 {
    let keys: Vec<_> = chunks.iter().map(|&chunk| key(chunk)).collect();
    let began = Instant::now();
    loop {
        let (hits, misses) = load(engine, tier, chunks, &keys);
        // Anew each time: a new leader gives up what the one that was killed had not.
        let required = ledger::required(ledger);
        let missing = misses.iter().find(|(digest, _)| required.contains(&(tier, *digest)));
        let Some((digest, outcome)) = missing else { return hits };
        let may_be_found = tier == SHARED && began.elapsed() < PATIENCE;
        assert!(may_be_found, "{digest} was published in tier {tier} and is {outcome:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// How many were hits, all of them right, and what became of the others.
fn load(
    engine: &Engine,
    tier: u8,
    chunks: &[u64],
    keys: &[ChunkKey],
) -> (u64, Vec<(Digest, Outcome)>) {
    let mut buffers: Vec<_> = chunks.iter().map(|&chunk| vec![0; payload_bytes(chunk)]).collect();
    let lease = engine.lookup(keys);
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    for want in &mut wants {
        want.tiers = TierMask::only(TierId(tier));
    }
    engine.load(&lease, &mut wants);
    let (hits, misses): (Vec<_>, Vec<_>) = wants.iter().partition(|want| want.outcome.is_hit());
    for want in &hits {
        assert_eq!(
            wrong_bytes(want.key.digest(), want.dest),
            0,
            "tier {tier}: {}",
            want.key.digest()
        );
    }
    (hits.len() as u64, misses.iter().map(|want| (want.key.digest(), want.outcome)).collect())
}

fn check_stats(engine: &Engine, root: &Path, required: &BTreeSet<(u8, Digest)>) {
    let stats = engine.stats();
    // Nobody counts a shared directory at once.
    for (number, tier) in (0..SHARED).zip(&stats.tiers) {
        let published = required.iter().filter(|(tier, _)| *tier == number).count() as u64;
        assert!(tier.recovered_chunks >= published, "{tier:?}");
        assert!(tier.used_bytes <= tier.capacity_bytes, "{tier:?}");
        let on_disk = disk_bytes(&store::tier_directory(root, number));
        assert!(tier.used_bytes >= on_disk, "uncounted files of earlier runs: {tier:?}, {on_disk}");
    }
}

fn check_cap(root: &Path, room: Room, when: &str) {
    for tier in 0..SHARED {
        let bytes = disk_bytes(&store::tier_directory(root, tier));
        assert!(bytes <= room.capacity().0, "tier {tier}, {when}: {bytes} of {}", room.capacity());
    }
}

/// The new leader has taken the dead one's place, has counted, and has made room.
fn await_shared_cap(root: &Path, room: Room) {
    let directory = store::tier_directory(root, SHARED);
    let began = Instant::now();
    while chunk_bytes(&directory) > room.capacity().0 {
        assert!(began.elapsed() < PATIENCE, "the shared directory's cap does not hold");
        thread::sleep(Duration::from_millis(5));
    }
}

/// What the chunks of a shared directory take. Files go while this looks.
fn chunk_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(it) if it.is_dir() => chunk_bytes(&entry.path()),
        Ok(it) if entry.path().extension().is_some_and(|end| end == "kvc") => it.blocks() * 512,
        _ => 0,
    };
    entries.map(bytes).sum()
}

/// As `du` counts; what the engine gives back meanwhile takes no space.
fn disk_bytes(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let own = fs::metadata(directory).map_or(0, |it| it.blocks() * 512);
    let bytes = |entry: fs::DirEntry| entry.metadata().map_or(0, |it| it.blocks() * 512);
    own + entries.map(|entry| bytes(entry.unwrap())).sum::<u64>()
}
