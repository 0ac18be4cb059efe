//! The scrubber: it finds what has rotted, and no step notices it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kv_connector::{ByteSize, Engine};
use kv_tiers::{
    Completion, EvictionGuard, MemoryConfig, MemoryTier, Op, OpId, Purpose, Rejected,
    ThrottleConfig, Throttled, Tier,
};

use crate::common::*;

fn wait_for(mut is_true: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while began.elapsed() < SOON {
        if is_true() {
            return true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    false
}

#[test]
fn rotten_chunks_are_found_and_dropped_without_any_load() {
    let place = Place::new();
    let known = keys("m", "", 8);
    place.filled_with(&known);
    // In the second block, and in the header.
    place.flip("one", &known[2], 4096 + (1 << 20) + 99);
    place.flip("two", &known[5], 4096 + 99);
    place.configure("scrub_bytes_per_s = \"1 GiB\"");
    let engine = place.engine();
    let done = || {
        let stats = engine.stats();
        stats.tiers[..2].iter().all(|tier| tier.scrub_damaged == 1 && tier.scrub_passes > 0)
    };
    assert!(wait_for(done), "{:#?}", engine.stats().tiers);
    let stats = engine.stats();
    for tier in &stats.tiers[..2] {
        assert_eq!((tier.chunks, tier.corrupt_reads, tier.lost_chunks), (7, 1, 1), "{tier:?}");
        assert!(tier.scrubbed_chunks >= 7, "{tier:?}");
    }
    assert_eq!((stats.chunks_held, stats.wanted), (8, 0));
    drop(engine);
    assert_eq!(place.json(&["fsck"]).0, 0);
    assert_eq!(served(&place.engine(), &known), [true; 8]);
}

#[test]
fn it_is_off_unless_asked_for() {
    let place = Place::new();
    place.filled_with(&keys("m", "", 4));
    let engine = place.engine();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(engine.stats().tiers[0].scrubbed_chunks, 0);
}

#[test]
fn its_rate_holds() {
    let place = Place::new();
    place.filled_with(&keys("m", "", 8));
    place.configure("scrub_bytes_per_s = \"8 MiB\"");
    let began = Instant::now();
    let engine = place.engine();
    assert!(wait_for(|| engine.stats().tiers[0].scrubbed_bytes > 3 << 20));
    let bytes = engine.stats().tiers[0].scrubbed_bytes;
    let elapsed_ms = u64::try_from(began.elapsed().as_millis()).unwrap();
    let allowed = (8 << 20) * elapsed_ms / 1000 + (1 << 20);
    assert!(bytes <= allowed, "{bytes} bytes in {elapsed_ms} ms");
}

/// Reads of each kind in flight, and what was seen that must not be.
#[derive(Debug, Default)]
struct Watched {
    looks: AtomicU64,
    looks_max: AtomicU64,
    uses: AtomicU64,
    looks_beside_uses: AtomicU64,
    all_looks: AtomicU64,
}

#[derive(Debug)]
struct Watching {
    inner: Box<dyn Tier>,
    looking: Vec<OpId>,
    seen: Arc<Watched>,
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Watching {
    forward_tier!(inner);

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        let read = match &op {
            Op::Read(read) => Some((read.id, read.purpose)),
            Op::Write(_) => None,
        };
        self.inner.submit(op, now_ns)?;
        match read {
            Some((id, Purpose::Look)) => {
                self.looking.push(id);
                self.seen.all_looks.fetch_add(1, Ordering::Relaxed);
                let looks = self.seen.looks.fetch_add(1, Ordering::Relaxed) + 1;
                self.seen.looks_max.fetch_max(looks, Ordering::Relaxed);
                let uses = self.seen.uses.load(Ordering::Relaxed);
                self.seen.looks_beside_uses.fetch_add(u64::from(uses > 0), Ordering::Relaxed);
            }
            Some(_) => drop(self.seen.uses.fetch_add(1, Ordering::Relaxed)),
            None => {}
        }
        Ok(())
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        let before = completions.len();
        let wake_ns = self.inner.poll(now_ns, guard, completions);
        for completion in &completions[before..] {
            if let Completion::Read { id, .. } = completion {
                match self.looking.iter().position(|it| it == id) {
                    Some(at) => {
                        self.looking.remove(at);
                        self.seen.looks.fetch_sub(1, Ordering::Relaxed);
                    }
                    None => drop(self.seen.uses.fetch_sub(1, Ordering::Relaxed)),
                }
            }
        }
        wake_ns
    }
}

#[test]
fn it_reads_one_piece_at_a_time_and_begins_none_while_a_step_reads() {
    let place = Place::new();
    let mut config = place.config();
    config.tiers.truncate(1);
    config.engine.host_cache = ByteSize(0);
    config.engine.scrub_bytes_per_s = ByteSize::gib(8);
    let arenas = Engine::arenas(&config).unwrap();
    let seen = Arc::new(Watched::default());
    let memory = Box::new(MemoryTier::new(MemoryConfig::new("one", 64 << 20)));
    // Slow enough that reads meet.
    let inner = Box::new(Throttled::new(memory, ThrottleConfig::new(400 << 20)));
    let watching = Watching { inner, looking: Vec::new(), seen: Arc::clone(&seen) };
    let engine = Engine::with_tiers(config, arenas, vec![Box::new(watching)]).unwrap();
    let known = keys("m", "", 8);
    store(&engine, &known);
    for round in 0..20 {
        assert_eq!(served(&engine, &known), [true; 8]);
        thread::sleep(Duration::from_millis(round % 5 * 4));
    }
    assert!(wait_for(|| seen.all_looks.load(Ordering::Relaxed) > 20), "{seen:?}");
    assert_eq!(seen.looks_max.load(Ordering::Relaxed), 1, "{seen:?}");
    assert_eq!(seen.looks_beside_uses.load(Ordering::Relaxed), 0, "{seen:?}");
}
