//! The process that is killed: stores and loads as fast as it may until then.

use std::{
    panic,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use kv_chunk::Digest;
use kv_connector::{
    Config, Engine, Event, Observer, Outcome, Stored, TierConfig, Want, now_ns,
    replay::{fill, wrong_bytes},
};
use kv_tiers::{NvmeConfig, NvmeTier, SharedConfig, SharedTier, Tier};

use crate::{
    CHILD,
    ledger::{Ledger, Note},
    noted::Noted,
    number,
    store::{self, Room, SHARED, key, payload_bytes},
};

pub(crate) const ROOM: &str = "KVBRAID_KILL9_ROOM";
pub(crate) const FIRST: &str = "KVBRAID_KILL9_FIRST";
pub(crate) const SEED: &str = "KVBRAID_KILL9_SEED";

pub(crate) fn run(root: &Path) {
    let room = Room::named(&std::env::var(ROOM).unwrap());
    let ledger = Arc::new(Ledger::open(&store::ledger_path(root)));
    note_panics(&ledger);
    let mut config = store::config(root, room);
    config.observer = Some(observer(&ledger));
    let engine = open(config, &ledger);
    let (seed, stored) = (number(SEED, 0), AtomicU64::new(number(FIRST, 0)));
    thread::scope(|scope| {
        scope.spawn(|| store_for_ever(&engine, room, seed, &stored));
        scope.spawn(|| load_for_ever(&engine, &ledger, seed, &stored));
    });
    unreachable!("{CHILD} runs until it is killed");
}

fn note_panics(ledger: &Arc<Ledger>) {
    let (ledger, words) = (Arc::clone(ledger), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        ledger.note(Note::Panicked, 0, Digest::from_bytes([0; 16]));
        words(info);
    }));
}

fn observer(ledger: &Arc<Ledger>) -> Observer {
    let ledger = Arc::clone(ledger);
    Observer::new(move |event| match event {
        Event::Published { digest, tier } => ledger.note(Note::Published, tier, digest),
        Event::Lost { digest, tier } => ledger.note(Note::Lost, tier, digest),
        _ => {}
    })
}

/// As the engine would open it, but for the notes.
pub(crate) fn open(config: Config, ledger: &Arc<Ledger>) -> Engine {
    let arenas = Engine::arenas(&config).unwrap();
    let registered = [Arc::clone(&arenas.reads), Arc::clone(&arenas.staging)];
    let tier = |(number, tier): (u8, &TierConfig)| {
        let inner = if number == SHARED {
            open_shared(tier)
        } else {
            let (path, capacity) = (tier.path.clone().unwrap(), tier.capacity.unwrap().0);
            let mut nvme = NvmeConfig::new(&tier.name, path, capacity);
            nvme.segment_bytes = tier.segment.map(|segment| segment.0);
            Box::new(NvmeTier::open(nvme, &registered, now_ns()).unwrap())
        };
        Box::new(Noted { inner, number, ledger: Arc::clone(ledger) }) as Box<dyn Tier>
    };
    let tiers = (0..).zip(&config.tiers).map(tier).collect();
    Engine::with_tiers(config, arenas, tiers).unwrap()
}

fn open_shared(tier: &TierConfig) -> Box<dyn Tier> {
    let (path, capacity) = (tier.path.clone().unwrap(), tier.capacity.unwrap().0);
    let section = tier.shared.clone().unwrap();
    let mut shared = SharedConfig::new(&tier.name, path, capacity, fastrand::u64(1..));
    shared.lease_ttl = Duration::from_millis(section.lease_ttl_ms);
    shared.count_every = Duration::from_millis(section.count_every_ms);
    Box::new(SharedTier::open(shared, now_ns()).unwrap())
}

/// With ample room every chunk once, in order; else any chunk again and again.
fn store_for_ever(engine: &Engine, room: Room, seed: u64, stored: &AtomicU64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut payload = Vec::new();
    loop {
        let chunk = match room {
            Room::Ample => stored.load(Ordering::Relaxed).min(room.chunks() - 1),
            Room::Tight => random.u64(0..room.chunks()),
        };
        let key = key(chunk);
        payload.resize(payload_bytes(chunk), 0);
        fill(key.digest(), &mut payload);
        match engine.store(&key, &payload) {
            Stored::Refused(_) => thread::sleep(Duration::from_micros(300)),
            _ => drop(stored.fetch_max(chunk + 1, Ordering::Relaxed)),
        }
    }
}

fn load_for_ever(engine: &Engine, ledger: &Ledger, seed: u64, stored: &AtomicU64) {
    let mut random = fastrand::Rng::with_seed(!seed);
    loop {
        let known = stored.load(Ordering::Relaxed).max(1);
        let chunks: Vec<u64> = (0..random.usize(1..12)).map(|_| random.u64(0..known)).collect();
        let keys: Vec<_> = chunks.iter().map(|&chunk| key(chunk)).collect();
        let mut buffers: Vec<_> =
            chunks.iter().map(|&chunk| vec![0; payload_bytes(chunk)]).collect();
        let lease = engine.lookup(&keys);
        let mut wants: Vec<_> =
            keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
        engine.load(&lease, &mut wants);
        for want in &wants {
            let digest = want.key.digest();
            if matches!(want.outcome, Outcome::Hit(_)) && wrong_bytes(digest, want.dest) > 0 {
                ledger.note(Note::WrongBytes, 0, digest);
            }
        }
        thread::sleep(Duration::from_micros(random.u64(0..2_000)));
    }
}
