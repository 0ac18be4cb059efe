//! One movement of bytes between a file and memory, and its cutting into requests.
//!
//! A transfer owns its memory and its file. It moves into a backend, and comes back when the kernel is done with both.

use std::{collections::VecDeque, mem::ManuallyDrop, sync::Arc};

use crate::{
    Record, Slot,
    nvme::{
        files::SegmentFile,
        segment::{BLOCK_LEN, Page},
    },
    probe::RequestLimits,
};

/// How often EAGAIN or EINTR is answered by asking again.
const RETRIES_MAX: u32 = 64;

static ZEROS: Page = Page([0; BLOCK_LEN]);

/// What a transfer reads into or writes from.
#[derive(Debug)]
pub(super) enum Memory {
    Slot(Slot),
    /// Shared with others: only written from.
    Record(Arc<Record>),
    Page(Box<Page>),
    /// A block of zeros, only written from.
    Zeros,
}

impl Memory {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Slot(slot) => slot,
            Self::Record(record) => record.stored_bytes(),
            Self::Page(page) => &page.0,
            Self::Zeros => &ZEROS.0,
        }
    }

    /// The bytes to read into; `None` where reading into is not allowed.
    pub(super) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match self {
            Self::Slot(slot) => Some(slot),
            Self::Page(page) => Some(&mut page.0),
            Self::Record(_) | Self::Zeros => None,
        }
    }

    /// The arena slot behind it, if any.
    pub(super) fn slot(&self) -> Option<&Slot> {
        match self {
            Self::Slot(slot) => Some(slot),
            Self::Record(record) => Some(record.slot()),
            Self::Page(_) | Self::Zeros => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Contiguous bytes in a file and in memory. Everything is a multiple of 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) file_offset: u64,
    pub(super) memory_offset: usize,
    pub(super) bytes: usize,
}

impl Run {
    fn after(self, bytes: usize) -> Self {
        Self {
            file_offset: self.file_offset + bytes as u64,
            memory_offset: self.memory_offset + bytes,
            bytes: self.bytes - bytes,
        }
    }

    fn before(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }
}

/// Bytes to move.
#[derive(Debug)]
pub(super) struct Transfer {
    /// Unique among those in a backend.
    pub(super) key: u64,
    pub(super) direction: Direction,
    pub(super) file: Arc<SegmentFile>,
    pub(super) memory: Memory,
    /// In this order; an empty one moves nothing.
    pub(super) runs: [Run; 2],
}

impl Transfer {
    /// A transfer of one run.
    pub(super) fn one(
        key: u64,
        direction: Direction,
        file: Arc<SegmentFile>,
        memory: Memory,
        run: Run,
    ) -> Self {
        let nothing = Run { bytes: 0, ..run };
        Self { key, direction, file, memory, runs: [run, nothing] }
    }

    /// Whether every run lies in the memory, and the memory may be used that way.
    pub(super) fn is_sound(&mut self) -> bool {
        let writable = match self.direction {
            Direction::Read => self.memory.bytes_mut().is_some(),
            Direction::Write => true,
        };
        let length = self.memory.bytes().len();
        let within =
            |run: &Run| run.memory_offset.checked_add(run.bytes).is_some_and(|end| end <= length);
        writable && self.runs.iter().all(within)
    }

    /// Never frees memory and file: a device may still use them.
    pub(super) fn leak(self) {
        let Self { file, memory, .. } = self;
        let _leaked = ManuallyDrop::new(file);
        match memory {
            Memory::Slot(slot) => slot.leak(),
            memory => {
                let _leaked = ManuallyDrop::new(memory);
            }
        }
    }
}

/// Why a transfer ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// Positive; 0 for a short transfer that asking again did not complete.
    pub(super) errno: i32,
    /// The request that failed.
    pub(super) run: Run,
    /// Bytes of it that were moved.
    pub(super) moved: u64,
}

/// What of a transfer is not yet sent, and what is in flight.
#[derive(Debug)]
pub(super) struct Progress {
    rest: VecDeque<Run>,
    request_bytes: usize,
    in_flight: u32,
    retries: u32,
    failure: Option<Failure>,
}

impl Progress {
    pub(super) fn new(runs: [Run; 2], request_bytes: usize) -> Self {
        let rest = runs.into_iter().filter(|run| run.bytes > 0).collect();
        Self { rest, request_bytes, in_flight: 0, retries: 0, failure: None }
    }

    /// One that ended before it began.
    pub(super) fn failed(runs: [Run; 2], errno: i32) -> Self {
        let failure = Some(Failure { errno, run: runs[0], moved: 0 });
        Self { failure, ..Self::new(runs, BLOCK_LEN) }
    }

    /// The next request to send; it counts as in flight. Requests of a run are of about equal length.
    pub(super) fn next_request(&mut self) -> Option<Run> {
        if !self.wants_more() {
            return None;
        }
        let run = self.rest.pop_front()?;
        let requests = run.bytes.div_ceil(self.request_bytes);
        let bytes = run.bytes.div_ceil(requests).next_multiple_of(BLOCK_LEN).min(run.bytes);
        if bytes < run.bytes {
            self.rest.push_front(run.after(bytes));
        }
        self.in_flight += 1;
        Some(run.before(bytes))
    }

    /// Takes a request back that was not sent.
    pub(super) fn unsend(&mut self, request: Run) {
        self.in_flight -= 1;
        self.rest.push_front(request);
    }

    /// Whether requests are left to send.
    pub(super) fn wants_more(&self) -> bool {
        self.failure.is_none() && !self.rest.is_empty()
    }

    /// Takes the result of a request: bytes moved, or a negative error number.
    pub(super) fn complete(&mut self, request: Run, result: i32) {
        self.in_flight -= 1;
        let Ok(moved) = usize::try_from(result) else {
            let errno = result.wrapping_neg();
            if [libc::EAGAIN, libc::EINTR].contains(&errno) && self.retries < RETRIES_MAX {
                self.retries += 1;
                self.rest.push_front(request);
            } else {
                self.failure.get_or_insert(Failure { errno, run: request, moved: 0 });
            }
            return;
        };
        // Direct I/O goes on from aligned offsets only: the last part of a block is asked for again.
        let whole = moved - moved % BLOCK_LEN;
        if moved >= request.bytes {
        } else if whole == 0 {
            let moved = moved as u64;
            self.failure.get_or_insert(Failure { errno: 0, run: request, moved });
        } else {
            self.rest.push_front(request.after(whole));
        }
    }

    /// Whether the kernel is done with the transfer.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Whether there is nothing left to do.
    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && !self.wants_more()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.failure
    }
}

/// How large requests may be, by the memory they use.
#[derive(Clone, Debug)]
pub(super) struct Sizing {
    limits: RequestLimits,
    /// Addresses of arenas whose pages are huge.
    huge: Vec<usize>,
}

impl Sizing {
    pub(super) fn new(limits: RequestLimits, arenas: &[Arc<crate::Arena>]) -> Self {
        let mostly_huge = |arena: &&Arc<crate::Arena>| {
            let stats = arena.stats();
            stats.huge_page_bytes >= stats.bytes / 10 * 9
        };
        let address = |arena: &Arc<crate::Arena>| arena.region().0.addr();
        Self { limits, huge: arenas.iter().filter(mostly_huge).map(address).collect() }
    }

    pub(super) fn request_bytes(&self, memory: &Memory) -> usize {
        let arena = memory.slot().map(|slot| slot.arena().region().0.addr());
        match arena {
            Some(address) if self.huge.contains(&address) => self.limits.huge_page_bytes,
            _ => self.limits.small_page_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;

    fn run(bytes: usize) -> Run {
        Run { file_offset: 40_960, memory_offset: 0, bytes }
    }

    fn progress(bytes: usize, request_bytes: usize) -> Progress {
        Progress::new([run(bytes), run(0)], request_bytes)
    }

    fn drain(progress: &mut Progress) -> Vec<Run> {
        std::iter::from_fn(|| progress.next_request()).collect()
    }

    #[test]
    fn requests_cover_a_run_once_and_stay_within_the_limit() {
        for blocks in 1..300 {
            let mut progress = progress(blocks * 4096, 512 * KIB);
            let requests = drain(&mut progress);
            let mut expected = run(blocks * 4096);
            for request in &requests {
                assert_eq!(request.file_offset, expected.file_offset);
                assert_eq!(request.memory_offset, expected.memory_offset);
                assert!(request.bytes <= 512 * KIB && request.bytes % 4096 == 0);
                expected = expected.after(request.bytes);
            }
            assert_eq!(expected.bytes, 0);
            assert_eq!(requests.len(), (blocks * 4096).div_ceil(512 * KIB));
        }
    }

    #[test]
    fn a_short_transfer_goes_on_from_the_last_whole_block() {
        let mut progress = progress(16 * KIB, 512 * KIB);
        let request = progress.next_request().unwrap();
        progress.complete(request, 5000);
        let rest = progress.next_request().unwrap();
        assert_eq!((rest.file_offset, rest.memory_offset, rest.bytes), (45_056, 4096, 12 * KIB));
        progress.complete(rest, 12 * 1024);
        assert!(progress.is_over() && progress.failure().is_none());
    }

    #[test]
    fn no_bytes_at_all_is_a_short_failure() {
        let mut progress = progress(8192, 512 * KIB);
        let request = progress.next_request().unwrap();
        progress.complete(request, 100);
        let failure = progress.failure().unwrap();
        assert_eq!((failure.errno, failure.moved), (0, 100));
        assert!(progress.is_over());
    }

    #[test]
    fn interruptions_are_retried_and_bounded() {
        let mut progress = progress(4096, 4096);
        for _ in 0..RETRIES_MAX {
            let request = progress.next_request().unwrap();
            progress.complete(request, -libc::EAGAIN);
        }
        let request = progress.next_request().unwrap();
        progress.complete(request, -libc::EINTR);
        assert_eq!(progress.failure().unwrap().errno, libc::EINTR);
    }

    #[test]
    fn a_negative_result_is_a_positive_errno_and_stops_further_requests() {
        let mut progress = progress(64 * KIB, 4096);
        let first = progress.next_request().unwrap();
        let second = progress.next_request().unwrap();
        progress.complete(second, -libc::EIO);
        assert_eq!(progress.next_request(), None);
        assert!(!progress.is_over(), "the first is still in the kernel");
        progress.complete(first, 4096);
        assert!(progress.is_over());
        assert_eq!(progress.failure().unwrap().errno, libc::EIO);
    }

    #[test]
    fn shared_memory_is_never_read_into() {
        let file = Arc::new(SegmentFile::for_tests(std::path::Path::new("/dev/null")));
        let run = run(4096);
        let mut read = Transfer::one(0, Direction::Read, Arc::clone(&file), Memory::Zeros, run);
        assert!(!read.is_sound());
        let page = Memory::Page(Page::zeroed());
        let beyond = Run { memory_offset: 4096, ..run };
        let mut read = Transfer::one(0, Direction::Read, file, page, beyond);
        assert!(!read.is_sound());
    }
}
