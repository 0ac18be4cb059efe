//! The seam: what a storage tier is to everything above it.

use std::{collections::BTreeMap, fmt, os::fd::BorrowedFd};

use kv_chunk::{Digest, WriteId};

use crate::{Completion, Op, Rejected};

/// One storage tier: an index of the chunks it holds, and reads and writes of them.
///
/// One thread owns a tier; nothing here blocks on the device. Time is an argument: `now_ns` is nanoseconds of one
/// monotonic origin and never goes back, so any tier also runs in virtual time.
///
/// # Contract
///
/// * A tier owns the index of what it holds; ops name a digest, and a chunk is a [`Record`](crate::Record): a 4 KiB
///   header followed by the payload, opaque to the tier.
/// * [`submit`](Tier::submit) queues and returns; each accepted op gives exactly one completion from a later
///   [`poll`](Tier::poll), however long the device takes. From submit to completion the tier owns the op's slot or
///   record: nobody else can touch a buffer that a device may still write.
/// * Op ids are the caller's; ids in flight at one time on one tier must differ.
/// * A read returns the bytes that are stored. The *caller* verifies them ([`Piece::verify`](crate::Piece::verify)).
/// * A chunk is visible (`contains`, `list`, reads) only after every byte of it is complete in this tier. A failed or
///   interrupted write leaves no visible chunk.
/// * Of several writes of one chunk exactly one succeeds, unless all fail; one that finds the chunk readable, at its
///   start or at its end, completes with `AlreadyHeld` and changes nothing.
/// * A chunk that is being read is neither evicted nor overwritten until the read completes.
/// * Used space never exceeds `capacity_bytes`, counting what earlier runs left.
/// * Dropping a tier waits a bounded time for what is in flight; past it, buffers and files are leaked, never freed
///   under a device that may still write them.
pub trait Tier: fmt::Debug + Send {
    /// Configured name, for reports.
    fn name(&self) -> &str;

    /// What this tier can do and demands.
    fn capabilities(&self) -> Capabilities;

    /// Queues an operation. A full queue, a closed tier or a record that can never fit gives the op back.
    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected>;

    /// Makes progress and appends what completed to `completions`.
    ///
    /// Before it drops a resident chunk to make room, the tier proposes it to `guard`, and drops it only if confirmed.
    /// Returns the next time at which it wants to be called even if [`wake_fd`](Tier::wake_fd) stays silent: `None`
    /// when time alone brings nothing (nothing is pending, or only held writes are), a time at or before `now_ns` for
    /// "again at once". A submit can make it earlier: poll after submitting.
    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64>;

    /// While held, no further write I/O starts (also between the parts of one write); reads are not affected. Writes are
    /// still accepted, and wait.
    fn hold_writes(&mut self, hold: bool);

    /// What is readable under `digest`, from memory, without I/O.
    fn contains(&self, digest: Digest) -> Option<Held>;

    /// What is readable under `digest`, also if others stored it. Never blocks: a tier that has to ask says
    /// [`Asked`](Located::Asked), makes [`wake_fd`](Tier::wake_fd) readable when it knows, and answers after the next
    /// [`poll`](Tier::poll). `Held` says that [`contains`](Tier::contains) is true from now on. An answer can be as old
    /// as the tier's documentation says.
    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        let _ = now_ns;
        self.contains(digest).map_or(Located::Absent, Located::Held)
    }

    /// Makes a chunk unreadable at once, and its space free once reads of it have completed. False: not held.
    ///
    /// A process that dies before [`TierStats::removals_pending`] is 0 again may find it held at the next open; what
    /// drives that on is [`poll`](Tier::poll).
    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool;

    /// Visits every readable chunk, in no order.
    fn list(&self, visit: &mut dyn FnMut(Digest, Held));

    /// Visits at most `max` (at least one) readable chunks from `from` on, in an order of the tier's own, and says where
    /// to go on; `None` at the end. Called until then, it visits each chunk that stays readable meanwhile, as the same
    /// staging, exactly once, and of others some.
    ///
    /// What the caller holds is bounded by `max`. The default goes through [`list`](Tier::list) for each call; a tier that
    /// can begin in the middle does better.
    fn list_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        let max = max.max(1);
        // The next ones by digest.
        let (mut page, mut more) = (BTreeMap::new(), false);
        self.list(&mut |digest, held| {
            let place = u128::from_be_bytes(digest.to_bytes());
            if place < from.0 {
                return;
            }
            if page.len() < max || page.last_key_value().is_some_and(|(last, _)| place < *last) {
                page.insert(place, held);
            } else {
                more = true;
            }
            if page.len() > max {
                page.pop_last();
                more = true;
            }
        });
        let next = page.last_key_value().and_then(|(last, _)| last.checked_add(1));
        for (place, held) in page {
            visit(Digest::from_bytes(place.to_be_bytes()), held);
        }
        next.filter(|_| more).map(ListCursor)
    }

    /// Ops accepted and not completed.
    fn in_flight(&self) -> usize;

    /// Counters and gauges.
    fn stats(&self) -> TierStats;

    /// Becomes readable when [`poll`](Tier::poll) has something to do; `None` if only time can bring completions.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Refuses new ops from now on; what is in flight still completes through `poll` (held writes once released).
    fn close(&mut self);
}

const _: Option<&dyn Tier> = None;

/// Where a listing in parts goes on. What the number means is the tier's own business.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListCursor(pub u128);

impl ListCursor {
    /// The beginning.
    pub const START: Self = Self(0);
}

/// Confirms evictions: only the engine knows which chunks are leased.
pub trait EvictionGuard {
    /// True gives the tier leave to drop its copy; from then on the directory no longer names this tier for it.
    fn try_evict(&self, digest: Digest) -> bool;

    /// Whether [`try_evict`](EvictionGuard::try_evict) would say so now; nothing changes. A tier that has to drop many
    /// chunks together asks first, so that none is given up for nothing. By default yes.
    fn may_evict(&self, digest: Digest) -> bool {
        let _ = digest;
        true
    }
}

/// Confirms every eviction: for a tier that is used alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unguarded;

impl EvictionGuard for Unguarded {
    fn try_evict(&self, _digest: Digest) -> bool {
        true
    }
}

/// A readable chunk, as a tier's index knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Length of the payload.
    pub payload_bytes: u64,
    /// Which staging of the chunk this is.
    pub write_id: WriteId,
}

/// What a tier knows of a chunk that somebody else may have stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Located {
    /// It is there.
    Held(Held),
    /// It is not, or cannot be asked for now.
    Absent,
    /// The answer is not known yet: ask again after a poll.
    Asked,
}

/// What a tier can do and demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Alignment of buffers and lengths; slots satisfy it when it divides 4096.
    pub alignment_bytes: u32,
    /// Other nodes write into the same store.
    pub shared: bool,
    /// Chunks survive the process.
    pub persistent: bool,
    /// Largest payload accepted.
    pub payload_bytes_max: u64,
    /// Ops that may be in flight; further submits are rejected.
    pub queue_ops_max: u32,
}

impl Capabilities {
    /// A private, volatile tier without demands; set the fields that differ.
    pub const fn new(payload_bytes_max: u64, queue_ops_max: u32) -> Self {
        Self {
            alignment_bytes: 1,
            shared: false,
            persistent: false,
            payload_bytes_max,
            queue_ops_max,
        }
    }
}

/// How a tier really does its I/O: a fallback is loud, sticky and visible here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoMode {
    /// Submission through io_uring (else threads; false for tiers without files).
    pub ring: bool,
    /// O_DIRECT.
    pub direct: bool,
    /// Slots registered with the kernel.
    pub registered_buffers: bool,
    /// Files registered with the kernel.
    pub registered_files: bool,
}

impl IoMode {
    /// Everything at once: what a driver tries first.
    pub const ALL: Self =
        Self { ring: true, direct: true, registered_buffers: true, registered_files: true };
}

/// Counters (since open) and gauges of one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierStats {
    /// Space that counts against the cap now: whole files, headers and padding included.
    pub used_bytes: u64,
    /// The cap.
    pub capacity_bytes: u64,
    /// Readable chunks.
    pub chunks: u64,
    /// Readable chunks that were found at open.
    pub recovered_chunks: u64,
    /// Reads that delivered all their bytes.
    pub reads: u64,
    /// Payload bytes of those.
    pub read_bytes: u64,
    /// Writes that published a chunk.
    pub writes: u64,
    /// Payload bytes of those.
    pub write_bytes: u64,
    /// Requests sent to the device for reads and writes (SQEs or system calls).
    pub device_requests: u64,
    /// Chunks dropped to make room.
    pub evictions: u64,
    /// Chunks that are removed here and may still be found by the next open, should the process die now.
    pub removals_pending: u64,
    /// Reads and writes that failed, by kind.
    pub errors: Vec<(crate::ErrorKind, u64)>,
    /// Highest number of ops in flight seen.
    pub in_flight_max: u32,
    /// How I/O is done.
    pub io_mode: IoMode,
    /// One line per fallback taken, with its cause.
    pub fallbacks: Vec<String>,
}

impl TierStats {
    /// Counts a read that ended.
    pub fn count_read(&mut self, result: &Result<crate::ReadDone, crate::TierError>) {
        match result {
            Ok(done) => {
                self.reads += 1;
                self.read_bytes += done.payload_bytes as u64;
            }
            Err(error) => self.count_error(error.kind()),
        }
    }

    /// Counts the write of a chunk, which ended.
    pub fn count_write(&mut self, payload_bytes: u64, result: &Result<(), crate::TierError>) {
        match result {
            Ok(()) => {
                self.writes += 1;
                self.write_bytes += payload_bytes;
            }
            Err(error) => self.count_error(error.kind()),
        }
    }

    /// Counts one failure.
    pub fn count_error(&mut self, kind: crate::ErrorKind) {
        self.count_errors(kind, 1);
    }

    /// Counts failures of one kind, as when a wrapper adds its own to those of what it wraps.
    pub fn count_errors(&mut self, kind: crate::ErrorKind, count: u64) {
        match self.errors.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, known)) => *known += count,
            None => self.errors.push((kind, count)),
        }
    }
}
