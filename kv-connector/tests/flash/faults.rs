//! Memory that fails while claims are staged: whatever happens, a read is right or a miss, and nothing stays protected.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kv_connector::{Config, Engine, FlashParts, FlashSection, TierParts};
use kv_cxl::{
    ArenaView, Caps, DaxTier, DaxTierConfig, Extent, FastTier, FastTierError, Load, Medium,
    MediumReader, PageCacheConfig, PageCacheFlash, Pinning, Residency, StageEvent, StageId,
};

use crate::{
    claims::{claims, until},
    common::{config, directory, fill, keys, load},
};

/// What is told to fail.
#[derive(Debug, Default)]
struct Orders {
    stage_fails: AtomicBool,
    protect_fails: AtomicBool,
    /// Says that it is done and brings nothing.
    stage_lies: AtomicBool,
    read_fails: AtomicBool,
    /// A byte of what is read is another.
    read_rots: AtomicBool,
    /// Nothing that is being staged ends.
    stage_held: AtomicBool,
    staging: AtomicU64,
    poll_panics: AtomicBool,
    /// Each read waits until so many were under way at once.
    readers_wanted: AtomicU64,
    reading: AtomicU64,
    reading_max: AtomicU64,
    /// Extents protected now, and the most bytes that ever were.
    protected: Mutex<Vec<Extent>>,
    protected_max: AtomicU64,
}

#[derive(Debug)]
struct Failing {
    inner: PageCacheFlash,
    orders: Arc<Orders>,
    failed: Vec<StageEvent>,
}

impl FastTier for Failing {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn arena(&self) -> ArenaView {
        self.inner.arena()
    }

    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError> {
        if self.orders.stage_lies.load(Ordering::Relaxed) {
            return Ok(Residency::Bytes(0));
        }
        self.inner.residency(extents)
    }

    fn submit_stage(
        &mut self,
        id: StageId,
        extents: &[Extent],
        now_ns: u64,
    ) -> Result<(), FastTierError> {
        if self.orders.stage_fails.load(Ordering::Relaxed) {
            let error = FastTierError::Device { errno: 5, extent: extents[0] };
            self.failed.push(StageEvent::Failed(id, error));
            return Ok(());
        }
        self.orders.staging.fetch_add(1, Ordering::Relaxed);
        self.inner.submit_stage(id, extents, now_ns)
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<StageEvent>) -> Option<u64> {
        assert!(!self.orders.poll_panics.load(Ordering::Relaxed), "as asked");
        if self.orders.stage_held.load(Ordering::Relaxed) {
            return Some(now_ns + 1_000_000);
        }
        events.append(&mut self.failed);
        self.inner.poll(now_ns, events)
    }

    fn protect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        if self.orders.protect_fails.load(Ordering::Relaxed) {
            return Err(FastTierError::NoCapacity { asked_bytes: 1, free_bytes: 0 });
        }
        self.inner.protect(extents, now_ns)?;
        let mut protected = self.orders.protected.lock().unwrap();
        protected.extend(extents);
        let bytes = protected.iter().map(|extent| extent.bytes).sum();
        self.orders.protected_max.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn unprotect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        let mut protected = self.orders.protected.lock().unwrap();
        protected.retain(|extent| !extents.iter().any(|ended| ended.overlaps(*extent)));
        self.inner.unprotect(extents, now_ns)
    }

    fn evict_hint(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.inner.evict_hint(extents, now_ns)
    }

    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError> {
        self.inner.flush(extents)
    }

    fn load(&self) -> Load {
        self.inner.load()
    }
}

/// Bytes that cannot be read while it is told so.
#[derive(Debug)]
struct BadMedium {
    inner: Box<dyn Medium>,
    orders: Arc<Orders>,
}

impl Medium for BadMedium {
    fn path(&self) -> &std::path::Path {
        self.inner.path()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        if self.orders.read_fails.load(Ordering::Relaxed) {
            let extent = Extent { offset, bytes: into.len() as u64 };
            return Err(FastTierError::Device { errno: 5, extent });
        }
        self.inner.read(offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        self.inner.write(offset, from)
    }

    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError> {
        self.inner.flush(extent)
    }

    fn reader(&self) -> Option<Arc<dyn MediumReader>> {
        let orders = Arc::clone(&self.orders);
        self.inner.reader().map(|inner| Arc::new(BadReader { inner, orders }) as _)
    }
}

#[derive(Debug)]
struct BadReader {
    inner: Arc<dyn MediumReader>,
    orders: Arc<Orders>,
}

impl MediumReader for BadReader {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        let orders = &self.orders;
        if orders.read_fails.load(Ordering::Relaxed) {
            let extent = Extent { offset, bytes: into.len() as u64 };
            return Err(FastTierError::Device { errno: 5, extent });
        }
        let now = orders.reading.fetch_add(1, Ordering::Relaxed) + 1;
        orders.reading_max.fetch_max(now, Ordering::Relaxed);
        let end = Instant::now() + Duration::from_secs(20);
        let wanted = orders.readers_wanted.load(Ordering::Relaxed);
        while orders.reading_max.load(Ordering::Relaxed) < wanted && Instant::now() < end {
            std::thread::yield_now();
        }
        let read = self.inner.read(offset, into);
        if orders.read_rots.load(Ordering::Relaxed) {
            into[into.len() - 1] ^= 1;
        }
        orders.reading.fetch_sub(1, Ordering::Relaxed);
        read
    }
}

struct Rig {
    engine: Engine,
    orders: Arc<Orders>,
    _directory: tempfile::TempDir,
}

fn rig(pinning: Pinning, change: impl FnOnce(&mut FlashSection)) -> Rig {
    let directory = directory();
    let path = directory.path().join("flash");
    let mut config: Config = config(&path);
    let mut section = FlashSection::default();
    change(&mut section);
    config.tiers[0].flash = Some(section);
    let mut memory = PageCacheConfig::new(&path, 32 << 20);
    (memory.bytes, memory.granule_bytes) = (Some(64 << 20), 64 << 10);
    memory.pinning = pinning;
    let memory = PageCacheFlash::open(memory).unwrap();
    let orders = Arc::new(Orders::default());
    let medium = BadMedium { inner: Box::new(memory.medium()), orders: Arc::clone(&orders) };
    let mut store = DaxTierConfig::new("f");
    store.place_align_bytes = 64 << 10;
    store.read_threads = 4;
    let store = DaxTier::open(store, Box::new(medium)).unwrap();
    let flash = FlashParts {
        places: store.places(),
        memory: Box::new(Failing {
            inner: memory,
            orders: Arc::clone(&orders),
            failed: Vec::new(),
        }),
    };
    let parts = TierParts { tier: Box::new(store), flash: Some(flash) };
    let arenas = Engine::arenas(&config).unwrap();
    let engine = Engine::with_parts(config, arenas, vec![parts]).unwrap();
    fill(&engine, &keys(0..12));
    Rig { engine, orders, _directory: directory }
}

const NOW: Option<Duration> = Some(Duration::ZERO);

impl Rig {
    /// A claim that fails under `order` takes the demand path, gives all back, and the next one is served.
    fn check_failure(&self, order: impl Fn(&Orders) -> &AtomicBool) {
        let keys = keys(0..4);
        order(&self.orders).store(true, Ordering::Relaxed);
        self.engine.claim("r", &keys, NOW);
        let status = until(&self.engine, |status| status.released == 1);
        assert_eq!((status.failed, status.ready, status.reserved_bytes), (1, 0, 0), "{status:?}");
        until(&self.engine, |status| status.protected_bytes == 0);
        assert!(self.orders.protected.lock().unwrap().is_empty());
        assert_eq!(self.engine.stats().chunks_leased, 0);
        assert_eq!(load(&self.engine, &keys).0.hits(), 4);
        order(&self.orders).store(false, Ordering::Relaxed);
        self.engine.claim("r", &keys, NOW);
        until(&self.engine, |status| status.states["ready"] == 1);
        assert_eq!(load(&self.engine, &keys).0.hits(), 4);
        until(&self.engine, |status| status.released == 2 && status.protected_chunks == 4);
    }
}

#[test]
fn a_burst_of_demand_reads_is_under_way_at_once() {
    let rig = rig(Pinning::IfAllowed, |_| {});
    rig.orders.readers_wanted.store(4, Ordering::Relaxed);
    let keys = keys(0..12);
    assert_eq!(load(&rig.engine, &keys).0.hits(), 12);
    assert_eq!(rig.orders.reading_max.load(Ordering::Relaxed), 4);
}

#[test]
fn an_error_while_staging_is_the_demand_path() {
    rig(Pinning::IfAllowed, |_| {}).check_failure(|orders| &orders.stage_fails);
}

#[test]
fn memory_that_cannot_be_protected_is_not_relied_on() {
    rig(Pinning::IfAllowed, |_| {}).check_failure(|orders| &orders.protect_fails);
}

#[test]
fn done_is_believed_only_if_the_bytes_are_there() {
    rig(Pinning::IfAllowed, |_| {}).check_failure(|orders| &orders.stage_lies);
}

#[test]
fn without_the_right_to_lock_protection_is_advisory_and_claims_work() {
    let rig = rig(Pinning::Advisory, |_| {});
    let keys = keys(0..4);
    rig.engine.claim("r", &keys, NOW);
    let status = until(&rig.engine, |status| status.states["ready"] == 1);
    assert_eq!(status.protection, "advisory");
    assert_eq!(load(&rig.engine, &keys).0.hits(), 4);
    assert_eq!(until(&rig.engine, |status| status.released == 1).protected_chunks, 4);
}

#[test]
fn a_medium_that_fails_under_a_ready_claim_is_a_miss_and_ends_the_claim() {
    let rig = rig(Pinning::IfAllowed, |_| {});
    let keys = keys(0..2);
    rig.engine.claim("r", &keys, NOW);
    until(&rig.engine, |status| status.states["ready"] == 1);
    rig.orders.read_fails.store(true, Ordering::Relaxed);
    let (report, _) = load(&rig.engine, &keys);
    assert_eq!((report.hits(), report.misses()), (0, 2));
    until(&rig.engine, |status| status.released == 1 && status.protected_bytes == 0);
}

#[test]
fn the_device_never_protects_more_than_the_budget_whatever_is_claimed_and_cancelled() {
    let budget = 6 << 20;
    let rig = rig(Pinning::IfAllowed, |section| {
        section.protected_bytes = Some(kv_connector::ByteSize(budget));
    });
    let keys = keys(0..12);
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..300 {
        let (first, count) = (random.usize(..11), random.usize(1..5));
        let some = &keys[first..(first + count).min(12)];
        let request = random.u8(..6).to_string();
        match random.u8(..6) {
            0..=2 => drop(rig.engine.claim(&request, some, NOW)),
            3 => drop(rig.engine.cancel(&request)),
            4 => drop(rig.engine.revise(&request, Some(Duration::from_millis(5)))),
            _ => {
                let (report, _) = load(&rig.engine, some);
                assert_eq!(report.hits(), some.len() as u64, "round {round}");
            }
        }
    }
    assert!(rig.orders.protected_max.load(Ordering::Relaxed) <= budget);
    assert!(claims(&rig.engine).staged_chunks > 0);
    for request in 0..6 {
        rig.engine.cancel(&request.to_string());
    }
    until(&rig.engine, |status| status.protected_bytes == 0 && status.reserved_bytes == 0);
    assert!(rig.orders.protected.lock().unwrap().is_empty());
    assert_eq!(rig.engine.stats().chunks_leased, 0);
}

impl Rig {
    fn until_staging(&self, count: u64) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.orders.staging.load(Ordering::Relaxed) < count {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_claim_cancelled_on_the_way_stages_no_more_than_the_device_has() {
    let rig = rig(Pinning::IfAllowed, |_| {});
    rig.orders.stage_held.store(true, Ordering::Relaxed);
    rig.engine.claim("r", &keys(0..12), NOW);
    rig.until_staging(8);
    assert!(rig.engine.cancel("r"));
    // What the device is bringing in stays protected until it is there.
    std::thread::sleep(Duration::from_millis(50));
    let status = claims(&rig.engine);
    assert_eq!((status.states["stage_draining"], status.released), (1, 0));
    assert!(status.protected_bytes > 8 << 20, "{status:?}");
    rig.orders.stage_held.store(false, Ordering::Relaxed);
    let status = until(&rig.engine, |status| status.released == 1 && status.protected_bytes == 0);
    assert_eq!((status.staged_chunks, status.cancelled, status.ready), (8, 1, 0));
    assert_eq!(rig.engine.stats().chunks_leased, 0);
}

#[test]
fn a_chunk_that_was_dropped_while_it_was_staged_is_not_ready() {
    let rig = rig(Pinning::IfAllowed, |_| {});
    let keys = keys(0..2);
    rig.orders.stage_held.store(true, Ordering::Relaxed);
    rig.engine.claim("r", &keys, NOW);
    rig.until_staging(2);
    rig.orders.read_rots.store(true, Ordering::Relaxed);
    assert_eq!(load(&rig.engine, &keys[..1]).0.hits(), 0);
    rig.orders.read_rots.store(false, Ordering::Relaxed);
    rig.orders.stage_held.store(false, Ordering::Relaxed);
    let status = until(&rig.engine, |status| status.released == 1 && status.protected_bytes == 0);
    assert_eq!((status.failed, status.ready, status.failed_chunks), (1, 0, 1));
    assert_eq!(load(&rig.engine, &keys).0.hits(), 1);
}

#[test]
fn a_staging_thread_that_panics_leaves_a_tier_without_claims() {
    let rig = rig(Pinning::IfAllowed, |_| {});
    let keys = keys(0..4);
    rig.engine.claim("r", &keys, NOW);
    until(&rig.engine, |status| status.states["ready"] == 1);
    rig.orders.poll_panics.store(true, Ordering::Relaxed);
    rig.engine.claim("other", &keys[..1], NOW);
    let end = Instant::now() + Duration::from_secs(20);
    while !rig.engine.claim("late", &keys, NOW).refused {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(rig.orders.protected.lock().unwrap().is_empty());
    let stats = rig.engine.stats();
    assert_eq!((stats.chunks_leased, claims(&rig.engine).protected_bytes), (0, 0));
    assert_eq!(load(&rig.engine, &keys).0.hits(), 4);
    assert!(!rig.engine.revise("r", NOW) && !rig.engine.cancel("r"));
    assert!(rig.engine.close(Duration::from_secs(20)).drained);
}
