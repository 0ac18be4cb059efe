//! What the medium is told before it is read.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use kv_cxl::{
    DaxTier, DaxTierConfig, DeviceDax, DeviceDaxConfig, Extent, FastTier, FastTierError, Medium,
    PageCacheConfig, PageCacheFlash, Residency,
};
use kv_tiers::{Arena, ArenaConfig, Completion, Op, OpId, Purpose, ReadOp, Unguarded};

use crate::chunks::{Content, Driver, digest};

const MIB: usize = 1 << 20;
const PAYLOAD: u32 = 2 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Told(Extent),
    Read(Extent),
}

/// Notes what it is told and what is read.
#[derive(Debug)]
struct Listening {
    inner: Box<dyn Medium>,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Medium for Listening {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        self.calls.lock().unwrap().push(Call::Read(Extent { offset, bytes: into.len() as u64 }));
        self.inner.read(offset, into)
    }

    fn will_read(&self, extent: Extent) {
        self.calls.lock().unwrap().push(Call::Told(extent));
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        self.inner.write(offset, from)
    }

    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError> {
        self.inner.flush(extent)
    }
}

/// What happens on the medium while three chunks are read, a mebibyte a poll.
fn calls(read_ahead_bytes: usize, blocks: std::ops::Range<u32>) -> Vec<Call> {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("memory");
    fs::write(&path, vec![0; 16 * MIB]).unwrap();
    let inner = Box::new(DeviceDax::open(&DeviceDaxConfig::new(&path)).unwrap().medium());
    let calls = Arc::default();
    let medium = Listening { inner, calls: Arc::clone(&calls) };
    let mut config = DaxTierConfig::new("memory");
    (config.poll_bytes_max, config.read_ahead_bytes) = (MIB, read_ahead_bytes);
    let tier = DaxTier::open(config, Box::new(medium)).unwrap();
    let mut driver = Driver::new(Box::new(tier), 4 * MIB);
    for number in 0..3 {
        driver.write(Content { number, version: 1, bytes: PAYLOAD }).0.unwrap();
    }
    calls.lock().unwrap().clear();
    let arena = Arena::new(ArenaConfig::new(4 * MIB, 3)).unwrap();
    for number in 0..3 {
        let (slot, purpose) = (arena.try_take().unwrap(), Purpose::Use);
        let id = OpId(100 + u64::from(number));
        let read = ReadOp { id, digest: digest(number), blocks: blocks.clone(), slot, purpose };
        driver.tier.submit(Op::Read(read), 0).unwrap();
    }
    let mut completions = Vec::new();
    while completions.len() < 3 {
        driver.tier.poll(0, &Unguarded, &mut completions);
    }
    assert!(completions.iter().all(|it| matches!(it, Completion::Read { result: Ok(_), .. })));
    let calls = calls.lock().unwrap();
    calls.clone()
}

/// Bytes that were told before they were read, and how far at most the telling was ahead.
fn judge(calls: &[Call]) -> (u64, u64) {
    let (mut told, mut read, mut told_bytes, mut ahead_max) = (Vec::<Extent>::new(), 0, 0, 0);
    for call in calls {
        match call {
            Call::Told(extent) => {
                assert!(told.iter().all(|it| !it.overlaps(*extent)), "{extent:?} is told twice");
                told.push(*extent);
                told_bytes += extent.bytes;
                ahead_max = ahead_max.max(told_bytes.saturating_sub(read));
            }
            Call::Read(extent) => {
                read += extent.bytes;
            }
        }
    }
    (told_bytes, ahead_max)
}

#[test]
fn queued_reads_are_told_once_before_they_are_copied_and_within_the_bound() {
    let record = u64::from(PAYLOAD) + 4096;
    let calls = calls(3 * MIB, 0..u32::MAX);
    // The first poll tells of twice what it copies, and only then reads.
    assert!(matches!(calls[..2], [Call::Told(it), Call::Read(_)] if it.bytes == 2 << 20));
    let (told, ahead) = judge(&calls);
    assert_eq!(told, 3 * record);
    assert!(ahead <= 3 << 20, "{ahead} bytes ahead");
    for (at, call) in calls.iter().enumerate() {
        let Call::Read(read) = call else { continue };
        let covers = |it: &&Call| matches!(it, Call::Told(told) if told.overlaps(*read));
        assert!(calls[..at].iter().any(|it| covers(&it)), "{read:?} was not told before");
    }
}

#[test]
fn of_a_piece_only_the_piece_is_told() {
    let calls = calls(32 * MIB, 1..2);
    let told = calls.iter().filter_map(|call| match call {
        Call::Told(extent) => Some(extent.bytes),
        Call::Read(_) => None,
    });
    assert_eq!(told.sum::<u64>(), 3 << 20);
}

#[test]
fn nothing_is_told_if_nothing_shall_be_read_ahead() {
    assert_eq!(judge(&calls(0, 0..u32::MAX)).0, 0);
}

#[test]
fn what_a_file_is_told_of_comes_into_memory_without_a_read() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("flash");
    fs::write(&path, vec![7; 8 * MIB]).unwrap();
    let mut tier = PageCacheFlash::open(PageCacheConfig::new(&path, 8 << 20)).unwrap();
    let whole = Extent { offset: 0, bytes: 8 << 20 };
    tier.flush(&[whole]).unwrap();
    tier.evict_hint(&[whole], 0).unwrap();
    if tier.residency(&[whole]).unwrap() != Residency::Bytes(0) {
        println!("SKIP reading ahead: nothing leaves the page cache here");
        return;
    }
    tier.medium().will_read(Extent { offset: 2 << 20, bytes: 4 << 20 });
    let told = Extent { offset: 2 << 20, bytes: 4 << 20 };
    let end = Instant::now() + Duration::from_secs(60);
    while tier.residency(&[told]).unwrap() != Residency::Bytes(4 << 20) {
        assert!(Instant::now() < end, "{:?}", tier.residency(&[told]));
        thread::sleep(Duration::from_millis(5));
    }
    // Past the end there is nothing to be told of.
    tier.medium().will_read(Extent { offset: 7 << 20, bytes: u64::MAX });
}
