//! Real threads: many store and read while each tier writes at its own pace and fails at times.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{key, payload};
use kv_chunk::{ChunkKey, Digest, WriteId};
use kv_tiers::{Arena, ArenaConfig};
use kv_writeback::{Next, Refused, Staged, Writeback, WritebackConfig, Written};

const TIERS: u8 = 3;
const CHUNKS: u32 = 64;
const STAGES_PER_THREAD: u32 = 1_500;
const STAGED_MAX: usize = 8;

/// Stands for the tiers' media and the directory in one: what each tier holds.
type Held = Mutex<BTreeMap<(u8, Digest), Vec<u8>>>;

struct World {
    writeback: Writeback,
    held: Held,
    write_ids: AtomicU64,
    stored: AtomicBool,
    origin: Instant,
}

impl World {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap()
    }

    fn store(&self, thread: u32) {
        let mut state = thread + 1;
        for _ in 0..STAGES_PER_THREAD {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let chunk = (state >> 16) % CHUNKS;
            let id = u128::from(self.write_ids.fetch_add(1, Ordering::Relaxed));
            let bytes = payload(chunk, id);
            let staged =
                self.writeback.stage(&key(chunk), &bytes, WriteId::new(id), 0b111, self.now_ns());
            match staged {
                Ok(Staged::Accepted { replicas }) => assert_ne!(replicas, 0),
                Ok(Staged::AlreadyStaged) => {}
                Err(Refused::StagingFull | Refused::QueueFull | Refused::NoSlot) => {
                    thread::yield_now();
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Writes until everything is stored and drained. Every `fail_nth` write fails.
    fn write(&self, tier: u8, pause: Duration, fail_nth: u64) {
        let mut writes = 0;
        while !(self.stored.load(Ordering::Acquire) && self.writeback.is_drained()) {
            let record = match self.writeback.next(tier, self.now_ns()) {
                Next::Write(record) => record,
                Next::Wait { until_ns } => {
                    let ns = until_ns.saturating_sub(self.now_ns()).min(200_000);
                    thread::sleep(Duration::from_nanos(ns));
                    continue;
                }
                Next::Idle => {
                    thread::yield_now();
                    continue;
                }
            };
            thread::sleep(pause);
            writes += 1;
            let digest = record.digest();
            let outcome = if writes % fail_nth == 0 { Written::Failed } else { Written::Done };
            if outcome == Written::Done {
                let bytes = record.payload().to_vec();
                self.held.lock().unwrap().insert((tier, digest), bytes);
            }
            self.writeback.finish(tier, digest, record.header().write_id(), outcome);
        }
    }

    fn read(&self) {
        let mut chunk = 0;
        while !self.stored.load(Ordering::Acquire) {
            chunk = (chunk + 1) % CHUNKS;
            self.writeback.gate().read_started();
            if let Some(record) = self.writeback.get(&key(chunk)) {
                let id = record.header().write_id().get();
                assert_eq!(record.payload(), payload(chunk, id));
                record.header().verify_payload(record.payload()).unwrap();
            }
            self.writeback.gate().read_finished();
            assert!(self.writeback.pending() <= STAGED_MAX);
        }
    }
}

#[test]
fn slow_and_failing_tiers_leak_no_slot_and_lose_no_count() {
    let arena = Arena::new(ArenaConfig::new(8 << 10, STAGED_MAX)).unwrap();
    let mut config = WritebackConfig::new(TIERS, STAGED_MAX);
    config.max_age_ns = 3_000_000;
    config.queue_chunks_max = 5;
    let world = World {
        writeback: Writeback::new(config, Arc::clone(&arena)).unwrap(),
        held: Mutex::default(),
        write_ids: AtomicU64::new(1),
        stored: AtomicBool::new(false),
        origin: Instant::now(),
    };
    thread::scope(|scope| {
        let world = &world;
        let stores = [0, 1, 2].map(|it| scope.spawn(move || world.store(it)));
        for (tier, pause_us, fail_nth) in [(0, 1, 7), (1, 50, 5), (2, 400, 3)] {
            scope.spawn(move || world.write(tier, Duration::from_micros(pause_us), fail_nth));
        }
        scope.spawn(|| world.read());
        stores.into_iter().for_each(|it| it.join().unwrap());
        world.stored.store(true, Ordering::Release);
    });
    let stats = world.writeback.stats();
    let ended = stats.replicas_written + stats.replicas_failed + stats.replicas_given_up;
    assert_eq!(stats.replicas_wanted, ended + stats.replicas_withdrawn, "{stats:?}");
    assert!(stats.staged > 0 && stats.replicas_given_up > 0 && stats.replicas_failed > 0);
    assert!(stats.pending_max <= STAGED_MAX);
    assert_eq!(arena.free_slots(), arena.slots(), "a slot leaked");
    let of = |digest: Digest| (0..CHUNKS).find(|it| key(*it).digest() == digest).unwrap();
    for ((_, digest), bytes) in world.held.lock().unwrap().iter() {
        let chunk = of(*digest);
        assert!(
            (1..world.write_ids.load(Ordering::Relaxed))
                .any(|id| *bytes == payload(chunk, u128::from(id)))
        );
    }
}

#[test]
fn a_chunk_is_never_invisible_between_staging_and_the_directory() {
    let arena = Arena::new(ArenaConfig::new(8 << 10, 4)).unwrap();
    let writeback = Writeback::new(WritebackConfig::new(1, 4), arena).unwrap();
    let (known, directory) = (AtomicU64::new(0), Mutex::new(BTreeMap::<Digest, ()>::new()));
    let keys: Vec<ChunkKey> = (0..400).map(key).collect();
    let in_directory = |key: &ChunkKey| directory.lock().unwrap().contains_key(&key.digest());
    thread::scope(|scope| {
        scope.spawn(|| {
            for (index, key) in (0..).zip(&keys) {
                let id = WriteId::new(index);
                while writeback.stage(key, b"bytes", id, 1, 0).is_err() {
                    thread::yield_now();
                }
                known.fetch_add(1, Ordering::Release);
            }
        });
        scope.spawn(|| {
            let mut written = 0;
            while written < keys.len() {
                let Next::Write(record) = writeback.next(0, 0) else { continue };
                directory.lock().unwrap().insert(record.digest(), ());
                let id = record.header().write_id();
                assert!(writeback.finish(0, record.digest(), id, Written::Done).last);
                written += 1;
            }
        });
        while known.load(Ordering::Acquire) < keys.len() as u64 {
            let count = usize::try_from(known.load(Ordering::Acquire)).unwrap();
            for key in keys[..count].iter().rev().take(8) {
                assert!(writeback.get(key).is_some() || in_directory(key));
            }
        }
    });
}
