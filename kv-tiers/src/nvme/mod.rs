//! A private directory on a local disk: preallocated segment files, io_uring, O_DIRECT.
//!
//! The files are drawn in `docs/segment.md`. Everything happens in [`poll`](Tier::poll); `submit` only queues.

mod backend;
mod config;
mod drain;
mod evict;
#[cfg(test)]
mod fault_tests;
mod files;
#[cfg(feature = "glommio")]
mod glommio;
mod index;
#[cfg(test)]
mod index_tests;
mod jobs;
mod journal;
mod lock;
mod open;
mod persist;
mod queues;
mod recover;
#[expect(
    unsafe_code,
    reason = "hands memory and files to the kernel, and owns them until it is done"
)]
mod ring;
mod room;
mod segment;
mod slots;
mod snapshot;
#[doc(hidden)]
pub mod synthetic;
mod threads;
mod transfer;
mod warm;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    process,
    sync::Arc,
};

use kv_chunk::Digest;
use nix::sys::eventfd::EventFd;

pub use self::config::{IoEngine, NvmeConfig};
use self::{
    backend::{Backend, Ended, Sending},
    drain::Drain,
    index::{Doomed, Index},
    jobs::Job,
    lock::DirectoryLock,
    persist::Persist,
    room::Space,
};
use crate::{
    Capabilities, Completion, EvictionGuard, Held, ListCursor, Op, ReadOp, RejectReason, Rejected,
    Tier, TierStats, WriteOp, record_bytes,
};

/// After a kernel that takes no requests: when to ask again.
const REFUSED_RETRY_NS: u64 = 1_000_000;
/// Changes that wait for the next poll.
const CHANGES_MAX: usize = 1024;

/// What the store consists of, beyond [`TierStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NvmeDetail {
    /// Segment files in use.
    pub segments: u64,
    /// Slots not used any more since a write to them failed, they lost bytes, or a later version wrote them.
    pub quarantined_slots: u64,
    /// Files in the directory that are not ours or of a later version: they count, and are left alone.
    pub left_alone_files: u64,
    /// Chunks found at open that a later version wrote.
    pub newer_chunks: u64,
    /// Segments dropped at open since they were damaged or beyond the cap.
    pub dropped_segments: u64,
    /// Slots whose header was read at open, since the index files did not tell of them for certain.
    pub scanned_slots: u64,
    /// Slots found at open with a header that is not whole: what an interrupted write leaves, or damage.
    pub torn_slots: u64,
}

/// A file or slot that is no chunk of the store, found at open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Which file.
    pub path: PathBuf,
    /// What about it.
    pub kind: FindingKind,
    /// In words.
    pub why: String,
}

/// Kinds of [`Finding`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FindingKind {
    /// Not ours, or of a later version: it counts against the cap and is never touched.
    LeftAlone,
    /// Left by an interrupted run.
    Leftover,
    /// Ours, and damaged beyond use.
    Damaged,
}

/// A tier on a local disk.
///
/// Chunks survive the process, also a killed one: a chunk is recovered if its header reached its slot, and the header
/// is written after the payload. Nothing is synced, so after a power failure a recovered chunk may hold wrong bytes,
/// which its checksums show to the reader.
///
/// Dropping the tier waits at most [`NvmeConfig::drop_wait`] for requests in flight, then leaks what they use. A forked
/// child may drop its copy: it touches nothing.
pub struct NvmeTier {
    config: NvmeConfig,
    owner_pid: u32,
    /// `None` only while dropping.
    backend: Option<Box<dyn Backend>>,
    wake: Arc<EventFd>,
    wake_raised: bool,
    index: Index,
    /// `None` until the index is known.
    persist: Option<Persist>,
    space: Space,
    drain: Drain,
    reads: VecDeque<ReadOp>,
    writes: VecDeque<WriteOp>,
    /// Chunks whose write has begun.
    writing: HashSet<Digest>,
    jobs: HashMap<u64, Job>,
    next_key: u64,
    ops: u32,
    hold_writes: bool,
    closed: bool,
    stats: TierStats,
    detail: NvmeDetail,
    findings: Vec<Finding>,
    /// Last: the directory is free again when all else is gone.
    _lock: DirectoryLock,
}

impl std::fmt::Debug for NvmeTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmeTier")
            .field("name", &self.config.name)
            .field("directory", &self.config.directory)
            .field("chunks", &self.index.len())
            .field("ops", &self.ops)
            .field("io_mode", &self.stats.io_mode)
            .finish_non_exhaustive()
    }
}

impl NvmeTier {
    /// Counters of the store itself.
    pub fn detail(&self) -> NvmeDetail {
        NvmeDetail {
            segments: self.index.segment_count() as u64,
            quarantined_slots: self.index.quarantined(),
            ..self.detail
        }
    }

    /// What was found at open besides chunks.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Removed chunks that a crash would bring back: their headers still stand on the medium.
    fn removals_pending(&self) -> u64 {
        let pending = |job: &&Job| match job {
            Job::Wipe { .. } => true,
            Job::Read { place, .. } => self.index.is_doomed(*place),
            _ => false,
        };
        self.jobs.values().filter(pending).count() as u64
    }

    fn is_foreign_process(&self) -> bool {
        process::id() != self.owner_pid
    }

    /// Makes `wake` readable, once until the next poll.
    fn raise_wake(&mut self) {
        if !self.wake_raised {
            self.wake_raised = self.wake.write(1).is_ok();
        }
    }

    fn reject_reason(&self, op: &Op) -> Option<RejectReason> {
        if self.closed || self.is_foreign_process() {
            return Some(RejectReason::Closed);
        }
        if self.config.look_only && matches!(op, Op::Write(_)) {
            return Some(RejectReason::Closed);
        }
        let fits = match op {
            Op::Write(write) => {
                let payload_bytes = write.record.header().payload_bytes();
                payload_bytes <= self.capabilities().payload_bytes_max
            }
            Op::Read(read) => self.index.get(read.digest).is_none_or(|entry| {
                jobs::bytes_in_slot(read, entry.held.payload_bytes) <= read.slot.len() as u64
            }),
        };
        if !fits {
            return Some(RejectReason::TooLarge);
        }
        (self.ops >= self.config.queue_ops_max).then_some(RejectReason::QueueFull)
    }

    /// Before what changed is acted on, or told: a kill from here on finds it in the journal.
    fn write_journal(&mut self) {
        match &mut self.persist {
            Some(persist) => persist.flush(&mut self.index, &self.wake),
            None => self.index.changes.clear(),
        }
    }

    /// Sends, reaps, and starts what follows, until the device has to be waited for.
    fn pump(&mut self, guard: &dyn EvictionGuard, completions: &mut Vec<Completion>) {
        let mut ended: Vec<Ended> = Vec::new();
        loop {
            self.start_reads(completions);
            if !self.hold_writes {
                self.start_writes(guard, completions);
            }
            self.write_journal();
            let sending = if self.hold_writes { Sending::ReadsOnly } else { Sending::All };
            let Some(backend) = &mut self.backend else { return };
            backend.pump(sending, &mut ended);
            if ended.is_empty() {
                return;
            }
            for transfer in ended.drain(..) {
                self.end_transfer(transfer, completions);
            }
        }
    }
}

impl Tier for NvmeTier {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn capabilities(&self) -> Capabilities {
        let fits = self.space.payload_bytes_max();
        Capabilities {
            alignment_bytes: 4096,
            persistent: true,
            ..Capabilities::new(self.config.payload_bytes_max.min(fits), self.config.queue_ops_max)
        }
    }

    fn submit(&mut self, op: Op, _now_ns: u64) -> Result<(), Rejected> {
        if let Some(reason) = self.reject_reason(&op) {
            return Err(Rejected { op, reason });
        }
        match op {
            Op::Read(read) => self.reads.push_back(read),
            Op::Write(write) => self.writes.push_back(write),
        }
        self.ops += 1;
        self.stats.in_flight_max = self.stats.in_flight_max.max(self.ops);
        self.raise_wake();
        Ok(())
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        if self.is_foreign_process() {
            return None;
        }
        backend::silence(&self.wake);
        self.wake_raised = false;
        self.pump(guard, completions);
        let mut goes_on = false;
        if !self.hold_writes && !self.drain.is_idle() {
            goes_on = self.drain(guard, completions);
            // What it dropped is to be wiped; the end of that wakes.
            self.pump(guard, completions);
        }
        self.write_journal();
        let persist = self.persist.as_mut();
        goes_on |= persist.is_some_and(|persist| persist.step(&self.index));
        if goes_on {
            return Some(now_ns);
        }
        let refused = self.backend.as_ref().is_some_and(|backend| backend.was_refused());
        refused.then_some(now_ns.saturating_add(REFUSED_RETRY_NS))
    }

    fn hold_writes(&mut self, hold: bool) {
        self.hold_writes = hold;
        if !hold && !self.is_foreign_process() {
            self.raise_wake();
        }
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.index.get(digest).map(|entry| entry.held)
    }

    fn remove(&mut self, digest: Digest, _now_ns: u64) -> bool {
        if self.is_foreign_process() {
            return false;
        }
        let Some(entry) = self.index.get(digest) else { return false };
        let Some(doomed) = self.index.doom(digest) else { return false };
        self.note_removed(entry.place.row);
        if let Doomed::Wipe(place) = doomed {
            self.start_wipe(place);
            self.raise_wake();
        }
        if self.index.changes.len() >= CHANGES_MAX {
            self.write_journal();
        }
        true
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        self.index.chunks().for_each(|(digest, held)| visit(digest, held));
    }

    fn list_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        self.index.chunks_from(from, max, visit)
    }

    fn in_flight(&self) -> usize {
        self.ops as usize
    }

    fn stats(&self) -> TierStats {
        TierStats {
            used_bytes: self.space.used_bytes(),
            capacity_bytes: self.config.capacity_bytes,
            chunks: self.index.len() as u64,
            removals_pending: self.removals_pending(),
            device_requests: self.backend.as_ref().map_or(0, |backend| backend.requests()),
            ..self.stats.clone()
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn close(&mut self) {
        self.closed = true;
    }
}

impl Drop for NvmeTier {
    fn drop(&mut self) {
        let Some(backend) = self.backend.take() else { return };
        if self.is_foreign_process() {
            backend::abandon(backend);
        } else {
            backend::drain(backend, &self.wake, self.config.drop_wait);
            if let Some(mut persist) = self.persist.take() {
                persist.close(&mut self.index);
            }
        }
    }
}

/// Bytes that a payload takes in a segment.
fn class_of(payload_bytes: u64) -> u64 {
    record_bytes(payload_bytes)
}
