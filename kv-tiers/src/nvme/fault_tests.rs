//! Faults below the tier, as values of the backend seam: refused, failed, short and stuck transfers.

#[path = "../../tests/nvme_support/mod.rs"]
mod nvme_support;

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::{
    sys::{
        eventfd::{EfdFlags, EventFd},
        stat::Mode,
    },
    unistd::mkfifo,
};
use nvme_support::{Driver, KIB, MIB, digest, on_disk, segments};
use tempfile::TempDir;

use crate::{
    Arena, ArenaConfig, ErrorKind, NvmeConfig, Tier, TierError,
    nvme::{
        backend::{Backend, Ended, Sending, drain},
        files::SegmentFile,
        ring::{Ring, RingOptions},
        transfer::{Direction, Failure, Memory, Run, Sizing, Transfer},
    },
    probe::RequestLimits,
};

/// What to do with a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Pass,
    /// It is not done, and ends with this errno (0: short).
    Fail(i32),
    /// It ends only when the rule lets it pass.
    Stuck,
}

type Rule = Box<dyn FnMut(&Transfer) -> Fate + Send>;

struct Faulty {
    inner: Box<dyn Backend>,
    rule: Arc<Mutex<Rule>>,
    pending: Vec<Transfer>,
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Backend for Faulty {
    fn start(&mut self, transfer: Transfer) {
        self.pending.push(transfer);
    }

    fn pump(&mut self, sending: Sending, ended: &mut Vec<Ended>) {
        for transfer in std::mem::take(&mut self.pending) {
            let fate = (self.rule.lock().unwrap())(&transfer);
            match fate {
                Fate::Pass => self.inner.start(transfer),
                Fate::Stuck => self.pending.push(transfer),
                Fate::Fail(errno) => {
                    let failure = Some(Failure { errno, run: transfer.runs[0], moved: 0 });
                    ended.push(Ended { transfer, failure });
                }
            }
        }
        self.inner.pump(sending, ended);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn was_refused(&self) -> bool {
        self.inner.was_refused()
    }

    fn requests(&self) -> u64 {
        self.inner.requests()
    }

    fn add_file(&mut self, file: &mut SegmentFile) {
        self.inner.add_file(file);
    }

    fn remove_file(&mut self, file: &SegmentFile) {
        self.inner.remove_file(file);
    }
}

fn is_read(transfer: &Transfer) -> bool {
    transfer.direction == Direction::Read
}

fn is_payload_write(transfer: &Transfer) -> bool {
    matches!(transfer.memory, Memory::Record(_)) && transfer.runs[0].memory_offset > 0
}

fn is_header_write(transfer: &Transfer) -> bool {
    matches!(transfer.memory, Memory::Record(_)) && transfer.runs[0].memory_offset == 0
}

fn is_wipe(transfer: &Transfer) -> bool {
    matches!(transfer.memory, Memory::Zeros)
}

/// Four slots of a 1 MiB record in one segment.
fn config(directory: &TempDir) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory.path(), 5 * MIB);
    config.segment_bytes = Some(4 * (MIB + 4 * KIB) + 4 * KIB);
    config
}

fn open(directory: &TempDir) -> (Driver, Arc<Mutex<Rule>>) {
    let mut driver = Driver::open(config(directory));
    let rule: Arc<Mutex<Rule>> = Arc::new(Mutex::new(Box::new(|_| Fate::Pass)));
    let inner = driver.tier.backend.take().unwrap();
    let faulty = Faulty { inner, rule: Arc::clone(&rule), pending: Vec::new() };
    driver.tier.backend = Some(Box::new(faulty));
    (driver, rule)
}

fn set(rule: &Mutex<Rule>, new: impl FnMut(&Transfer) -> Fate + Send + 'static) {
    *rule.lock().unwrap() = Box::new(new);
}

/// Fails what `matches` accepts, `times` times.
fn fail(
    rule: &Mutex<Rule>,
    errno: i32,
    mut times: u32,
    matches: impl Fn(&Transfer) -> bool + Send + 'static,
) {
    set(rule, move |transfer| {
        if times > 0 && matches(transfer) {
            times -= 1;
            return Fate::Fail(errno);
        }
        Fate::Pass
    });
}

fn refuse_direct(transfer: &Transfer) -> bool {
    transfer.file.direct()
}

#[test]
fn direct_io_refused_at_run_time_becomes_buffered_for_good() {
    for is_hit in [is_read, is_payload_write, is_header_write, is_wipe] {
        let directory = on_disk();
        let (mut driver, rule) = open(&directory);
        driver.write(0, MIB);
        driver.write(1, MIB);
        assert!(driver.tier.stats().io_mode.direct);
        fail(&rule, libc::EINVAL, u32::MAX, move |it| refuse_direct(it) && is_hit(it));
        driver.check(0, MIB);
        (2..10).for_each(|number| driver.write(number, MIB));
        (7..10).for_each(|number| driver.check(number, MIB));
        let stats = driver.tier.stats();
        assert!(!stats.io_mode.direct && stats.io_mode.ring, "{:?}", stats.io_mode);
        assert_eq!(stats.errors, []);
        let told = stats.fallbacks.iter().filter(|line| line.contains("O_DIRECT")).count();
        assert_eq!(told, 1, "{:?}", stats.fallbacks);
        // Another size takes the segment: nothing of it may stay open.
        driver.write(20, 2 * MIB);
        driver.check(20, 2 * MIB);
        let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
        let gone = open.filter_map(|entry| fs::read_link(entry.path()).ok()).filter(|link| {
            let link = link.to_string_lossy();
            link.contains("(deleted)") && link.contains(&*directory.path().to_string_lossy())
        });
        assert_eq!(gone.collect::<Vec<_>>(), <[std::path::PathBuf; 0]>::default());
    }
}

#[test]
fn einval_on_a_buffered_file_is_an_error() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    driver.write(0, MIB);
    fail(&rule, libc::EINVAL, 2, is_read);
    let error = driver.try_read(0, 0..9).unwrap_err();
    assert!(matches!(error, TierError::Io { errno: libc::EINVAL, .. }), "{error}");
    driver.check(0, MIB);
}

#[test]
fn a_read_error_names_its_place_and_the_third_loses_the_chunk() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    driver.write(0, MIB);
    driver.write(1, MIB);
    fail(&rule, libc::EIO, 3, is_read);
    for _ in 0..2 {
        let error = driver.try_read(0, 0..9).unwrap_err();
        let TierError::Io { context, errno: libc::EIO, .. } = error else { panic!("{error}") };
        assert_eq!((context.call, context.offset, context.length), ("read", 4096, MIB + 4096));
        assert_eq!(context.path, segments(directory.path())[0]);
        assert!(driver.holds(0) && driver.lost.is_empty());
    }
    driver.try_read(0, 0..9).unwrap_err();
    assert!(!driver.holds(0));
    assert_eq!(driver.lost.len(), 1);
    assert_eq!(driver.tier.detail().quarantined_slots, 1);
    assert!(matches!(driver.try_read(0, 0..9), Err(TierError::NotFound { .. })));
    assert_eq!(driver.tier.stats().errors, [(ErrorKind::Io, 3), (ErrorKind::NotFound, 1)]);
    driver.check(1, MIB);
    driver.write(0, MIB);
    driver.check(0, MIB);
}

#[test]
fn a_short_read_loses_the_chunk_at_once() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    driver.write(0, MIB);
    fail(&rule, 0, 1, is_read);
    assert!(matches!(driver.try_read(0, 0..9), Err(TierError::Short { .. })));
    assert!(!driver.holds(0));
    assert_eq!(driver.lost.len(), 1);
}

#[test]
fn a_failed_write_leaves_no_chunk_and_its_slot_is_not_used_again() {
    for is_hit in [is_payload_write, is_header_write] {
        let directory = on_disk();
        let (mut driver, rule) = open(&directory);
        fail(&rule, libc::EIO, 1, is_hit);
        let error = driver.try_write(0, MIB).unwrap_err();
        assert!(matches!(error, TierError::Io { errno: libc::EIO, .. }), "{error}");
        assert!(!driver.holds(0));
        assert_eq!(driver.tier.detail().quarantined_slots, 1);
        (0..4).for_each(|number| driver.write(number, MIB));
        assert_eq!(driver.held(0..4).len(), 3, "three slots are left");
        assert_eq!(driver.tier.stats().writes, 4);
    }
}

#[test]
fn a_full_file_system_fails_writes_and_keeps_the_slot() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    fail(&rule, libc::ENOSPC, 2, is_payload_write);
    for _ in 0..2 {
        assert_eq!(driver.try_write(0, MIB).unwrap_err().kind(), ErrorKind::NoSpace);
        assert!(!driver.holds(0));
    }
    (0..4).for_each(|number| driver.write(number, MIB));
    assert_eq!(driver.held(0..4).len(), 4);
    assert_eq!(driver.tier.detail().quarantined_slots, 0);
}

#[test]
fn a_failed_wipe_takes_the_slot_out_of_use() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    (0..4).for_each(|number| driver.write(number, MIB));
    fail(&rule, libc::EIO, 1, is_wipe);
    driver.write(4, MIB);
    assert_eq!(driver.tier.detail().quarantined_slots, 1);
    assert_eq!(driver.evicted, [digest(0), digest(1)]);
    (2..5).for_each(|number| driver.check(number, MIB));
}

#[test]
fn a_size_whose_slots_all_failed_gets_a_new_segment() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    fail(&rule, libc::EIO, 4, is_payload_write);
    (0..4).for_each(|number| drop(driver.try_write(number, MIB).unwrap_err()));
    assert_eq!(driver.tier.detail().quarantined_slots, 4);
    driver.write(5, MIB);
    driver.check(5, MIB);
    assert_eq!(driver.tier.detail().quarantined_slots, 0);
}

#[test]
fn a_killed_write_whose_header_was_not_written_is_not_found_again() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    driver.write(0, MIB);
    set(&rule, |transfer| if is_header_write(transfer) { Fate::Stuck } else { Fate::Pass });
    driver.submit_write(1, MIB);
    for _ in 0..50 {
        driver.poll(&crate::Unguarded);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(driver.tier.in_flight(), 1);
    assert!(!driver.holds(1), "its header is not written");
    drop(driver);
    let (mut driver, _) = open(&directory);
    assert_eq!(driver.held(0..2), [0]);
    (1..4).for_each(|number| driver.write(number, MIB));
    (0..4).for_each(|number| driver.check(number, MIB));
}

#[test]
fn a_torn_header_is_wiped_and_its_slot_used_again() {
    let directory = on_disk();
    let (mut driver, _) = open(&directory);
    (0..4).for_each(|number| driver.write(number, MIB));
    drop(driver);
    let path = &segments(directory.path())[0];
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    file.write_all_at(&[0; 2048], 4096 + 2048).unwrap();
    nvme_support::remove_index_files(directory.path());
    let (mut driver, _) = open(&directory);
    assert_eq!(driver.held(0..4), [1, 2, 3]);
    driver.settle();
    let mut header = [1; 4096];
    file.read_exact_at(&mut header, 4096).unwrap();
    assert_eq!(header, [0; 4096]);
    driver.write(0, MIB);
    assert!(driver.evicted.is_empty());
    (0..4).for_each(|number| driver.check(number, MIB));
}

#[test]
fn a_slot_is_not_wiped_or_used_again_while_it_is_read() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    (0..4).for_each(|number| driver.write(number, MIB));
    set(&rule, |transfer| if is_read(transfer) { Fate::Stuck } else { Fate::Pass });
    let reads = [driver.submit_read(0, 0..9), driver.submit_read(0, 0..1)];
    driver.poll(&crate::Unguarded);
    // Ten writes go through the other three slots.
    (10..20).for_each(|number| driver.write(number, MIB));
    assert!(driver.holds(0) && !driver.evicted.contains(&digest(0)));
    assert!(driver.tier.remove(digest(0), 0));
    assert!(!driver.holds(0));
    (20..30).for_each(|number| driver.write(number, MIB));
    set(&rule, |_| Fate::Pass);
    driver.settle();
    for (id, blocks) in reads.into_iter().zip([0..9, 0..1]) {
        let (slot, result) = driver.read.remove(&id).unwrap();
        let key = nvme_support::key(0);
        let piece = crate::Piece::verify(slot, result.unwrap(), &key, &blocks).unwrap();
        assert!(piece.bytes() == nvme_support::payload(0, 1, MIB));
    }
    driver.write(30, MIB);
    assert_eq!(driver.held(20..31).len(), 4, "the slot is in use again");
}

#[test]
fn a_write_in_flight_is_not_found_and_a_second_one_waits_for_it() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    set(&rule, |transfer| if is_header_write(transfer) { Fate::Stuck } else { Fate::Pass });
    let first = driver.submit_write(0, MIB);
    let second = driver.submit_write(0, MIB);
    assert!(matches!(driver.try_read(0, 0..9), Err(TierError::NotFound { .. })));
    set(&rule, |_| Fate::Pass);
    driver.settle();
    let result = |id| &driver.written.iter().find(|(written, ..)| *written == id).unwrap().2;
    assert!(result(first).is_ok());
    assert!(matches!(result(second), Err(TierError::AlreadyHeld { .. })));
    driver.check(0, MIB);
}

#[test]
fn after_a_failed_write_the_next_one_of_the_chunk_is_done() {
    let directory = on_disk();
    let (mut driver, rule) = open(&directory);
    fail(&rule, libc::EIO, 1, is_header_write);
    driver.submit_write(0, MIB);
    driver.submit_write(0, MIB);
    driver.settle();
    assert_eq!(driver.written.iter().filter(|(.., result)| result.is_ok()).count(), 1);
    driver.check(0, MIB);
}

/// A ring with a read in flight that ends only when somebody writes into the FIFO.
#[test]
fn dropping_a_ring_leaks_what_the_kernel_still_uses() {
    let directory = on_disk();
    let path = directory.path().join("fifo");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    let arena = Arena::new(ArenaConfig::new(4096, 2)).unwrap();
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let wake = Arc::new(EventFd::from_value_and_flags(0, flags).unwrap());
    let sizing = Sizing::new(RequestLimits::of(directory.path(), None), &[]);
    let options = RingOptions {
        entries: 4,
        write_requests_max: 4,
        register_buffers: false,
        register_files: false,
        sizing,
    };
    let mut ring = Ring::new(options, &[], Arc::clone(&wake), &mut Vec::new()).unwrap();
    let file = Arc::new(SegmentFile::for_tests(&path));
    let run = Run { file_offset: 0, memory_offset: 0, bytes: 4096 };
    let memory = Memory::Slot(arena.try_take().unwrap());
    ring.start(Transfer::one(1, Direction::Read, Arc::clone(&file), memory, run));
    ring.pump(Sending::All, &mut Vec::new());
    assert_eq!(ring.in_flight(), 1);
    drain(Box::new(ring), &wake, Duration::from_millis(50));
    let stats = arena.stats();
    assert_eq!((stats.leaked_slots, stats.free_slots), (1, 1));
    assert_eq!(Arc::strong_count(&file), 2, "the file is leaked too");
    OpenOptions::new().write(true).open(&path).unwrap().write_all(&[1; 4096]).unwrap();
}
