//! A directory on a parallel or network file system that many nodes mount: one file a chunk, the first writer wins.
//!
//! The files are drawn in `docs/shared.md`. Every call that can hang runs on a thread of the pool; the tier's own thread
//! only hands out jobs and takes back what they brought.

mod collect;
mod config;
mod index;
mod inspect;
mod jobs;
mod lease;
mod lookup;
mod media;
mod open;
mod ops;
mod paths;
mod pool;
mod publish;
mod space;
mod survey;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ffi::OsString,
    mem::{self, ManuallyDrop},
    os::fd::{AsFd, BorrowedFd},
    process,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use kv_chunk::Digest;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};

pub use self::config::{Modes, OpenAs, PublishBy, SharedConfig};
use self::{
    collect::Doom,
    index::Index,
    lease::{Beat, Figures},
    lookup::Looks,
    ops::{QueuedRead, QueuedWrite, Running},
    paths::Fan,
    pool::{Lane, LaneId, Message},
    publish::Place,
    space::Space,
};
use crate::{
    Capabilities, Completion, EvictionGuard, Finding, Held, Located, Op, RejectReason, Rejected,
    Tier, TierStats, record_bytes,
};

/// Counters of the store itself, beyond [`TierStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedDetail {
    /// How chunks are published here.
    pub publish: Option<PublishBy>,
    /// This node counts and collects.
    pub leader: bool,
    /// Bytes given to the file system, headers and lost races included.
    pub written_bytes: u64,
    /// Writes that found the chunk there when theirs was complete.
    pub lost_races: u64,
    /// Files removed since they were no whole chunks.
    pub torn_removed: u64,
    /// Chunks that a later version wrote, found by an opening to look.
    pub newer_chunks: u64,
    /// Temporaries of dead writers removed.
    pub stale_removed: u64,
    /// Chunks looked for on the file system.
    pub looked_for: u64,
    /// Those that were there.
    pub found: u64,
    /// Ops that failed since all threads hang.
    pub timed_out: u64,
    /// Times that the directory was counted whole.
    pub counted: u64,
}

/// A tier in a directory that many nodes share.
///
/// * A chunk that is there, whoever wrote it, is not written again. Of writers at one moment the first to be complete
///   wins, and the others remove theirs.
/// * Chunks of other nodes are found by [`locate`](Tier::locate), without listing anything.
/// * The cap is the directory's, not the node's. One node, the leader, counts and collects; the figure lags behind what
///   other nodes write. A lease (of the engine) binds only its own node's leader: for the others, use is a touched
///   modification time, so a chunk that is known here can be gone, which a read finds out.
/// * Calls on a mount that hangs block threads of the pool only. While all of them hang, ops fail with `ETIMEDOUT`; what
///   those threads use stays with them.
///
/// Bytes are flushed before a chunk is published. Dropping the tier waits at most [`SharedConfig::drop_wait`].
pub struct SharedTier {
    config: SharedConfig,
    owner_pid: u32,
    place: Arc<Place>,
    /// Data and small jobs; `None` only while dropping.
    lanes: Option<(Lane, Lane)>,
    keeper: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
    messages: mpsc::Receiver<Message>,
    wake: Arc<EventFd>,
    wake_raised: bool,
    figures: Arc<Mutex<Figures>>,
    beat: Beat,
    beats: u64,
    counted_at_beat: u64,
    /// The last counting found too much.
    trim: bool,
    /// Temporaries by place and name, and the beat at which they were first seen.
    temporaries: HashMap<(Fan, OsString), u64>,
    index: Index,
    space: Space,
    reads: VecDeque<QueuedRead>,
    writes: VecDeque<QueuedWrite>,
    running: HashMap<u64, Running>,
    /// Reads accepted and not completed, by chunk.
    readers: HashMap<Digest, u32>,
    /// Chunks whose write runs.
    writing: HashSet<Digest>,
    /// Chunks that are to be removed, unreadable already.
    doomed: HashMap<Digest, Doom>,
    looks: Looks,
    next_key: u64,
    ops: u32,
    hold_writes: bool,
    /// Writes were released since the last poll: only now their time begins to count.
    released: bool,
    closed: bool,
    stats: TierStats,
    detail: SharedDetail,
    findings: Vec<Finding>,
}

impl std::fmt::Debug for SharedTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedTier")
            .field("name", &self.config.name)
            .field("directory", &self.config.directory)
            .field("chunks", &self.index.len())
            .field("ops", &self.ops)
            .field("leader", &self.beat.leader)
            .finish_non_exhaustive()
    }
}

impl SharedTier {
    /// Counters of the store itself.
    pub fn detail(&self) -> SharedDetail {
        SharedDetail {
            publish: (self.config.open_as == OpenAs::Node).then_some(self.place.publish),
            leader: self.beat.leader,
            counted: self.space.rounds_ended,
            ..self.detail
        }
    }

    /// What an opening to look found besides chunks.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    fn is_foreign_process(&self) -> bool {
        process::id() != self.owner_pid
    }

    fn raise_wake(&mut self) {
        if !self.wake_raised {
            self.wake_raised = self.wake.write(1).is_ok();
        }
    }

    fn next_key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn reject_reason(&self, op: &Op) -> Option<RejectReason> {
        if self.closed || self.is_foreign_process() {
            return Some(RejectReason::Closed);
        }
        if self.config.open_as != OpenAs::Node && matches!(op, Op::Write(_)) {
            return Some(RejectReason::Closed);
        }
        let fits = match op {
            Op::Write(write) => {
                let payload_bytes = write.record.header().payload_bytes();
                payload_bytes <= self.config.payload_bytes_max
                    && record_bytes(payload_bytes) <= self.config.capacity_bytes
            }
            Op::Read(read) => self.index.get(read.digest).is_none_or(|entry| {
                read.bytes_in_slot(entry.held.payload_bytes) <= read.slot.len() as u64
            }),
        };
        if !fits {
            return Some(RejectReason::TooLarge);
        }
        (self.ops >= self.config.queue_ops_max).then_some(RejectReason::QueueFull)
    }

    fn take_messages(&mut self, now_ns: u64, completions: &mut Vec<Completion>) {
        while let Ok(message) = self.messages.try_recv() {
            match message {
                Message::Beat(beat) => self.take_beat(beat, now_ns),
                Message::Done { lane, key, done } => {
                    let Some((data, small)) = &mut self.lanes else { return };
                    match lane {
                        LaneId::Data => data.ended(key),
                        LaneId::Small => small.ended(key),
                    }
                    if let Some(running) = self.running.remove(&key) {
                        self.take_done(running, done, now_ns, completions);
                    }
                }
            }
        }
    }

    fn put_figures(&self) {
        let mut place = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        *place = self.space.figures();
    }

    /// Waits for what runs, at most about `limit`. No clock is read: only slices in which nothing ends count.
    fn drain(&mut self, limit: Duration) {
        const SLICE: Duration = Duration::from_millis(10);
        let mut slices = limit.as_millis() / SLICE.as_millis();
        loop {
            let mut ended = false;
            while let Ok(message) = self.messages.try_recv() {
                ended |= matches!(message, Message::Done { .. });
                if let (Message::Done { lane, key, .. }, Some((data, small))) =
                    (&message, &mut self.lanes)
                {
                    match lane {
                        LaneId::Data => data.ended(*key),
                        LaneId::Small => small.ended(*key),
                    }
                }
            }
            let idle =
                self.lanes.as_ref().is_none_or(|(data, small)| data.is_idle() && small.is_idle());
            let left = self.keeper.as_ref().is_none_or(|(_, thread)| thread.is_finished());
            if idle && left {
                return;
            }
            if !ended {
                let Some(rest) = slices.checked_sub(1) else { break };
                slices = rest;
            }
            let timeout = PollTimeout::try_from(SLICE).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut [PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)], timeout);
            let _ = self.wake.read();
        }
        tracing::warn!(
            tier = self.config.name,
            "calls did not return: their threads are left to themselves"
        );
    }
}

impl Tier for SharedTier {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn capabilities(&self) -> Capabilities {
        let fits =
            (self.config.capacity_bytes & !4095).saturating_sub(kv_chunk::HEADER_BYTES as u64);
        Capabilities {
            shared: true,
            persistent: true,
            ..Capabilities::new(self.config.payload_bytes_max.min(fits), self.config.queue_ops_max)
        }
    }

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        if let Some(reason) = self.reject_reason(&op) {
            return Err(Rejected { op, reason });
        }
        match op {
            Op::Read(read) => {
                *self.readers.entry(read.digest).or_default() += 1;
                // What is doomed is gone already; what comes to stand there later is not what was asked for.
                let doomed = self.doomed.contains_key(&read.digest);
                self.reads.push_back(QueuedRead { op: read, doomed });
            }
            Op::Write(op) => {
                self.writes.push_back(QueuedWrite {
                    op,
                    begun: None,
                    since_ns: now_ns,
                    asked_round: None,
                });
            }
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
        let _ = self.wake.read();
        self.wake_raised = false;
        self.take_messages(now_ns, completions);
        if mem::take(&mut self.released) {
            self.writes.iter_mut().for_each(|write| write.since_ns = now_ns);
        }
        self.expire(now_ns, completions);
        self.start_reads(now_ns, completions);
        if !self.hold_writes {
            self.start_writes(now_ns, guard, completions);
        }
        self.collect(now_ns, guard, completions);
        self.start_looks(now_ns);
        self.put_figures();
        self.next_ns()
    }

    fn hold_writes(&mut self, hold: bool) {
        if self.is_foreign_process() {
            return;
        }
        self.place.hold.store(hold, Ordering::Relaxed);
        if self.hold_writes && !hold {
            self.released = true;
            self.raise_wake();
        }
        self.hold_writes = hold;
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.index.get(digest).map(|entry| entry.held)
    }

    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        self.look_for(digest, now_ns)
    }

    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool {
        if self.is_foreign_process() {
            return false;
        }
        let Some(entry) = self.index.remove(digest) else { return false };
        self.doom(digest, inspect::If::WrittenAs(entry.held.write_id), 0);
        self.start_removals(now_ns);
        true
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        self.index.iter().for_each(|(digest, held)| visit(digest, held));
    }

    fn in_flight(&self) -> usize {
        self.ops as usize
    }

    fn stats(&self) -> TierStats {
        TierStats {
            used_bytes: self.space.used_bytes(),
            capacity_bytes: self.config.capacity_bytes,
            chunks: self.index.len() as u64,
            removals_pending: self.doomed.len() as u64,
            recovered_chunks: self.index.found(),
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

impl Drop for SharedTier {
    fn drop(&mut self) {
        if self.is_foreign_process() {
            // Queues and locks may be in any state here, and the arena is not mapped.
            let _leaked = (
                ManuallyDrop::new(self.lanes.take()),
                ManuallyDrop::new(self.keeper.take()),
                ManuallyDrop::new(mem::take(&mut self.reads)),
                ManuallyDrop::new(mem::take(&mut self.writes)),
            );
            return;
        }
        self.put_figures();
        if let Some((stop, _)) = &self.keeper {
            let _ = stop.send(());
        }
        self.reads.clear();
        self.writes.clear();
        self.drain(self.config.drop_wait);
        self.lanes = None;
    }
}
