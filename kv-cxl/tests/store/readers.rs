//! Reads by threads: several at once, no more than there are, and nothing is overwritten or freed under one.

use std::{
    fs::File,
    path::Path,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kv_cxl::{
    DaxTier, DaxTierConfig, Extent, FastTierError, FileMedium, Medium, MediumReader,
    PageCacheConfig, PageCacheFlash,
};
use kv_tiers::{
    Arena, ArenaConfig, Completion, Op, OpId, Piece, Purpose, ReadOp, Record, Tier, TierError,
    Unguarded, WriteOp,
};

use crate::chunks::{Content, digest, key};

const THREADS: usize = 4;
const COUNT: u32 = 8;
const PAYLOAD_BYTES: u32 = 70_000;

/// How many reads are under way, and when they may go on.
#[derive(Debug, Default)]
struct Crossing {
    inside: Mutex<Inside>,
    changed: Condvar,
    fails: AtomicBool,
    panics: AtomicBool,
}

#[derive(Debug, Default)]
struct Inside {
    now: usize,
    most: usize,
    /// Each waits until so many have been inside at once.
    wanted: usize,
    held: bool,
    writes: usize,
}

impl Crossing {
    fn change(&self, change: impl FnOnce(&mut Inside)) {
        change(&mut self.inside.lock().unwrap());
        self.changed.notify_all();
    }

    fn pass(&self) {
        self.change(|inside| {
            inside.now += 1;
            inside.most = inside.most.max(inside.now);
        });
        let waits = |inside: &mut Inside| inside.most < inside.wanted || inside.held;
        let inside = self.inside.lock().unwrap();
        let limit = Duration::from_secs(20);
        let (inside, _) = self.changed.wait_timeout_while(inside, limit, waits).unwrap();
        drop(inside);
        self.change(|inside| inside.now -= 1);
    }
}

#[derive(Clone, Debug)]
struct Counting {
    inner: FileMedium,
    crossing: Arc<Crossing>,
}

impl Medium for Counting {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        Medium::read(&self.inner, offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        self.crossing.change(|inside| inside.writes += 1);
        self.inner.write(offset, from)
    }

    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError> {
        self.inner.flush(extent)
    }

    fn reader(&self) -> Option<Arc<dyn MediumReader>> {
        Some(Arc::new(self.clone()))
    }
}

impl MediumReader for Counting {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        self.crossing.pass();
        assert!(!self.crossing.panics.load(Ordering::Relaxed), "as asked");
        if self.crossing.fails.load(Ordering::Relaxed) {
            let extent = Extent { offset, bytes: into.len() as u64 };
            return Err(FastTierError::Device { errno: 5, extent });
        }
        Medium::read(&self.inner, offset, into)
    }
}

struct Rig {
    tier: DaxTier,
    arena: Arc<Arena>,
    crossing: Arc<Crossing>,
    completions: Vec<Completion>,
    _directory: tempfile::TempDir,
}

fn content(number: u32) -> Content {
    Content { number, version: 1, bytes: PAYLOAD_BYTES }
}

impl Rig {
    /// A store that holds chunks `0..count`.
    fn new(count: u32) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("memory");
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        let crossing = Arc::new(Crossing::default());
        let inner = PageCacheFlash::open(PageCacheConfig::new(&path, 0)).unwrap().medium();
        let medium = Counting { inner, crossing: Arc::clone(&crossing) };
        let mut config = DaxTierConfig::new("memory");
        config.read_threads = THREADS;
        let mut rig = Self {
            tier: DaxTier::open(config, Box::new(medium)).unwrap(),
            arena: Arena::new(ArenaConfig::new(128 << 10, 16)).unwrap(),
            crossing,
            completions: Vec::new(),
            _directory: directory,
        };
        (0..count).for_each(|number| rig.write(number));
        rig.wait(count as usize).into_iter().for_each(|it| match it {
            Completion::Write { result, .. } => result.unwrap(),
            other => panic!("{other:?}"),
        });
        rig
    }

    fn write(&mut self, number: u32) {
        let (slot, content) = (self.arena.try_take().unwrap(), content(number));
        let record = Record::encode(slot, &key(number), content.write_id(), &content.payload());
        let record = Arc::new(record.map_err(|_| "too large").unwrap());
        let write = WriteOp { id: OpId(1000 + u64::from(number)), record };
        self.tier.submit(Op::Write(write), 0).unwrap();
    }

    fn read(&mut self, number: u32) {
        let (slot, digest) = (self.arena.try_take().unwrap(), digest(number));
        let id = OpId(number.into());
        let read = ReadOp { id, digest, blocks: 0..u32::MAX, slot, purpose: Purpose::Use };
        self.tier.submit(Op::Read(read), 0).unwrap();
    }

    fn poll(&mut self) {
        self.tier.poll(0, &Unguarded, &mut self.completions);
    }

    /// Polls until so many ops have completed.
    fn wait(&mut self, count: usize) -> Vec<Completion> {
        let end = Instant::now() + Duration::from_secs(60);
        while self.completions.len() < count {
            assert!(Instant::now() < end, "{} of {count}", self.completions.len());
            self.poll();
            thread::sleep(Duration::from_micros(200));
        }
        std::mem::take(&mut self.completions)
    }

    /// Polls until so many reads are under way.
    fn wait_inside(&mut self, count: usize) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.crossing.inside.lock().unwrap().now < count {
            assert!(Instant::now() < end);
            self.poll();
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// The read brought this chunk's bytes.
fn check_right(completion: Completion) -> u32 {
    let Completion::Read { id, slot, result, .. } = completion else { panic!("{completion:?}") };
    let number = u32::try_from(id.0).unwrap();
    let piece = Piece::verify(slot, result.unwrap(), &key(number), &(0..u32::MAX));
    assert!(piece.unwrap().bytes() == content(number).payload(), "chunk {number}");
    number
}

#[test]
fn as_many_reads_are_under_way_as_there_are_threads() {
    let mut rig = Rig::new(10);
    rig.crossing.change(|inside| inside.wanted = THREADS);
    (0..10).for_each(|number| rig.read(number));
    assert_eq!(rig.tier.in_flight(), 10);
    let mut numbers: Vec<u32> = rig.wait(10).into_iter().map(check_right).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    assert_eq!(rig.crossing.inside.lock().unwrap().most, THREADS);
    assert_eq!(rig.tier.in_flight(), 0);
    let stats = rig.tier.stats();
    assert_eq!((stats.reads, stats.device_requests), (10, 10 + 2 * 10));
}

#[test]
fn a_chunk_that_is_removed_while_it_is_read_is_not_overwritten_until_it_was() {
    let mut rig = Rig::new(2);
    rig.crossing.change(|inside| inside.held = true);
    rig.read(0);
    rig.wait_inside(1);
    assert!(rig.tier.remove(digest(0), 0));
    let before = rig.crossing.inside.lock().unwrap().writes;
    rig.write(7);
    for _ in 0..20 {
        rig.poll();
        thread::sleep(Duration::from_millis(1));
    }
    assert!(rig.completions.is_empty());
    assert_eq!(rig.crossing.inside.lock().unwrap().writes, before);
    rig.crossing.change(|inside| inside.held = false);
    let mut completions = rig.wait(2).into_iter();
    assert_eq!(check_right(completions.next().unwrap()), 0);
    assert!(matches!(completions.next(), Some(Completion::Write { result: Ok(()), .. })));
    rig.read(7);
    rig.read(0);
    let ended = rig.wait(2);
    let absent = |it: &Completion| {
        matches!(it, Completion::Read { result: Err(TierError::NotFound { .. }), .. })
    };
    assert_eq!(ended.iter().filter(|it| absent(it)).count(), 1);
    assert_eq!(ended.into_iter().find(|it| !absent(it)).map(check_right), Some(7));
}

#[test]
fn an_error_or_a_panic_gives_the_slot_back_and_the_next_read_is_served() {
    for panics in [false, true] {
        let mut rig = Rig::new(COUNT);
        let order = if panics { &rig.crossing.panics } else { &rig.crossing.fails };
        order.store(true, Ordering::Relaxed);
        (0..COUNT).for_each(|number| rig.read(number));
        for ended in rig.wait(COUNT as usize) {
            let Completion::Read { result: Err(error), .. } = ended else { panic!("{ended:?}") };
            assert!(panics || error.to_string().contains("error 5"), "{error}");
        }
        let order = if panics { &rig.crossing.panics } else { &rig.crossing.fails };
        order.store(false, Ordering::Relaxed);
        (0..COUNT).for_each(|number| rig.read(number));
        assert_eq!(rig.wait(COUNT as usize).into_iter().map(check_right).count(), COUNT as usize);
    }
}

#[test]
fn a_tier_is_dropped_when_its_reads_have_ended() {
    let mut rig = Rig::new(3);
    rig.crossing.change(|inside| inside.held = true);
    (0..3).for_each(|number| rig.read(number));
    rig.wait_inside(3);
    let Rig { tier, arena, crossing, .. } = rig;
    let later = Arc::clone(&crossing);
    let release = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        later.change(|inside| inside.held = false);
    });
    drop(tier);
    assert_eq!(crossing.inside.lock().unwrap().now, 0);
    // Every slot is free again.
    let slots: Vec<_> = std::iter::from_fn(|| arena.try_take()).collect();
    assert_eq!(slots.len(), 16);
    release.join().unwrap();
}
