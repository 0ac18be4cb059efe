//! Reads the chunks of a tier that nobody else uses, and says of each whether it is whole.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    os::fd::BorrowedFd,
    sync::Arc,
    thread,
    time::Duration,
};

use kv_chunk::{ChunkHeader, ChunkKey, Digest, HeaderError, block_count};
use kv_tiers::{
    Arena, Completion, ErrorKind, Held, Op, OpId, Piece, Purpose, ReadDone, ReadOp, RejectReason,
    Rejected, Slot, Tier, TierError, Unguarded,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::Pages;
use crate::clock::now_ns;

/// Blocks of 1 MiB in one read: any chunk is read with slots of this size.
pub(super) const BLOCKS_PER_READ: u32 = 4;
/// Reads in flight.
pub(super) const READS_MAX: usize = 4;
/// A device that completes nothing for so long is given up.
const STALL_NS: u64 = 60_000_000_000;
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What is wrong with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Damage {
    /// Its header is not one, or not whole.
    Header,
    /// A block of its payload is not what was written.
    Checksum,
    /// It is shorter than its header says.
    Length,
    /// Another chunk is stored in its place.
    OtherKey,
    /// Its header does not say what the tier's index says.
    Index,
    /// The index names it, and it is gone.
    Missing,
    /// The device does not give it back. It is reported and left: the device may only be out of order now.
    Unreadable,
    /// A later version wrote it. It is no damage, and is left alone.
    Newer,
}

impl Damage {
    /// Whether the bytes are there and are wrong.
    pub fn is_repairable(self) -> bool {
        !matches!(self, Self::Missing | Self::Unreadable | Self::Newer)
    }

    pub(crate) fn of_header(error: &HeaderError) -> Self {
        match error {
            HeaderError::Version { .. } => Self::Newer,
            HeaderError::Key => Self::OtherKey,
            HeaderError::BlockCrc { .. } => Self::Checksum,
            HeaderError::PayloadLength { .. } | HeaderError::PayloadTooLarge { .. } => Self::Length,
            _ => Self::Header,
        }
    }

    fn of_read(error: &TierError) -> Self {
        match error.kind() {
            ErrorKind::NotFound => Self::Missing,
            ErrorKind::Short => Self::Length,
            _ => Self::Unreadable,
        }
    }
}

/// How much of each chunk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    Header,
    All,
}

/// A chunk that was read.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) digest: Digest,
    pub(super) held: Held,
    /// If the header is whole and this chunk's.
    pub(super) header: Option<ChunkHeader>,
    pub(super) damage: Option<Damage>,
}

/// The tier completes nothing any more, or the caller asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Stalled,
    Stopped,
}

/// No more than so many bytes a second.
#[derive(Debug)]
pub(super) struct Pace {
    bytes_per_s: u64,
    next_ns: u64,
}

impl Pace {
    pub(super) fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s: bytes_per_s.unwrap_or(0), next_ns: 0 }
    }

    fn is_ready(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns
    }

    fn spend(&mut self, bytes: u64, now_ns: u64) {
        if self.bytes_per_s > 0 {
            let ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
            let ns = u64::try_from(ns).unwrap_or(u64::MAX);
            self.next_ns = self.next_ns.max(now_ns).saturating_add(ns);
        }
    }
}

/// A chunk of which reads are open.
struct Open {
    held: Held,
    reads_left: u32,
    header: Option<ChunkHeader>,
    damage: Option<Damage>,
}

struct Asked {
    digest: Digest,
    blocks: Range<u32>,
}

/// One pass over chunks of a tier.
pub(super) struct Reader<'a> {
    tier: &'a mut dyn Tier,
    arena: &'a Arc<Arena>,
    depth: Depth,
    todo: VecDeque<Asked>,
    asked: HashMap<OpId, Asked>,
    open: HashMap<Digest, Open>,
    next_op: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(tier: &'a mut dyn Tier, arena: &'a Arc<Arena>, depth: Depth) -> Self {
        Self {
            tier,
            arena,
            depth,
            todo: VecDeque::new(),
            asked: HashMap::new(),
            open: HashMap::new(),
            next_op: 0,
        }
    }

    /// Reads every chunk that the tier has, calling `each` as [`visit`](Self::visit) does.
    pub(super) fn visit_all(
        &mut self,
        pace: &mut Pace,
        each: &mut dyn FnMut(&mut dyn Tier, Seen) -> bool,
    ) -> Result<(), Ended> {
        let mut pages = Pages::default();
        loop {
            let page = pages.take_page(self.tier);
            if page.is_empty() {
                return Ok(());
            }
            self.visit(&page, pace, each)?;
        }
    }

    /// Reads `chunks` in this order, calling `each` with every one when it is known; false from it stops.
    fn visit(
        &mut self,
        chunks: &[(Digest, Held)],
        pace: &mut Pace,
        each: &mut dyn FnMut(&mut dyn Tier, Seen) -> bool,
    ) -> Result<(), Ended> {
        let mut coming = chunks.iter();
        let mut progress_ns = now_ns();
        let mut completions = Vec::new();
        let mut stopped = None;
        loop {
            let now = now_ns();
            while stopped.is_none() && self.asked.len() < READS_MAX && pace.is_ready(now) {
                if self.todo.is_empty() {
                    let Some((digest, held)) = coming.next() else { break };
                    self.plan(*digest, *held);
                }
                if !self.submit_next(pace, now, each) {
                    break;
                }
            }
            if self.asked.is_empty() && (stopped.is_some() || coming.len() == 0) {
                return stopped.map_or(Ok(()), Err);
            }
            let wake_ns = self.tier.poll(now_ns(), &Unguarded, &mut completions);
            if completions.is_empty() {
                if now.saturating_sub(progress_ns) > STALL_NS {
                    return Err(Ended::Stalled);
                }
                wait(self.tier.wake_fd(), wake_ns.is_some());
            } else {
                progress_ns = now;
            }
            for completion in completions.drain(..) {
                if !self.take(completion, each) {
                    stopped = Some(Ended::Stopped);
                }
            }
            if self.asked.is_empty() && !pace.is_ready(now) {
                progress_ns = now;
            }
        }
    }

    fn plan(&mut self, digest: Digest, held: Held) {
        let blocks = u32::try_from(block_count(held.payload_bytes)).unwrap_or(u32::MAX);
        let before = self.todo.len();
        let end = match self.depth {
            Depth::Header => 0,
            Depth::All => blocks,
        };
        // At least one read: the header is to be seen of an empty chunk, too.
        for first in (0..end.max(1)).step_by(BLOCKS_PER_READ as usize) {
            let blocks = first..(first + BLOCKS_PER_READ).min(end);
            self.todo.push_back(Asked { digest, blocks });
        }
        let reads_left = u32::try_from(self.todo.len() - before).unwrap_or(u32::MAX);
        self.open.insert(digest, Open { held, reads_left, header: None, damage: None });
    }

    /// False: not now.
    fn submit_next(
        &mut self,
        pace: &mut Pace,
        now_ns: u64,
        each: &mut dyn FnMut(&mut dyn Tier, Seen) -> bool,
    ) -> bool {
        let Some(slot) = self.arena.try_take() else { return false };
        let Some(asked) = self.todo.pop_front() else { return false };
        self.next_op += 1;
        let (id, digest) = (OpId(self.next_op), asked.digest);
        let bytes = u64::from(asked.blocks.end - asked.blocks.start) << 20;
        let op = ReadOp { id, digest, blocks: asked.blocks.clone(), slot, purpose: Purpose::Look };
        match self.tier.submit(Op::Read(op), now_ns) {
            Ok(()) => {
                let known = self.open.get(&digest).map_or(bytes, |open| open.held.payload_bytes);
                pace.spend(bytes.min(known) + 4096, now_ns);
                self.asked.insert(id, asked);
                true
            }
            Err(Rejected { reason: RejectReason::QueueFull, .. }) => {
                self.todo.push_front(asked);
                false
            }
            Err(_) => {
                self.note(digest, Damage::Unreadable);
                self.end_read(digest, each)
            }
        }
    }

    /// False: the caller stops.
    fn take(
        &mut self,
        completion: Completion,
        each: &mut dyn FnMut(&mut dyn Tier, Seen) -> bool,
    ) -> bool {
        let Completion::Read { id, slot, result, .. } = completion else { return true };
        let Some(asked) = self.asked.remove(&id) else { return true };
        match result {
            Ok(done) => self.verify(&asked, slot, done),
            Err(error) => self.note(asked.digest, Damage::of_read(&error)),
        }
        self.end_read(asked.digest, each)
    }

    fn verify(&mut self, asked: &Asked, slot: Slot, done: ReadDone) {
        let Some(open) = self.open.get_mut(&asked.digest) else { return };
        match verify(slot, done, asked.digest, &asked.blocks, open.held) {
            Ok(header) => open.header = Some(header),
            Err(damage) => self.note(asked.digest, damage),
        }
    }

    fn note(&mut self, digest: Digest, damage: Damage) {
        if let Some(open) = self.open.get_mut(&digest) {
            open.damage = open.damage.or(Some(damage));
        }
    }

    fn end_read(
        &mut self,
        digest: Digest,
        each: &mut dyn FnMut(&mut dyn Tier, Seen) -> bool,
    ) -> bool {
        let Some(open) = self.open.get_mut(&digest) else { return true };
        open.reads_left -= 1;
        if open.reads_left > 0 {
            return true;
        }
        let Some(Open { held, header, damage, .. }) = self.open.remove(&digest) else {
            return true;
        };
        each(self.tier, Seen { digest, held, header, damage })
    }
}

/// Checks one read without knowing the key: the stored one must be the one that the index asked for.
pub(crate) fn verify(
    slot: Slot,
    done: ReadDone,
    digest: Digest,
    blocks: &Range<u32>,
    held: Held,
) -> Result<ChunkHeader, Damage> {
    let header = ChunkHeader::parse(&slot).map_err(|error| Damage::of_header(&error))?;
    let key = ChunkKey::from_canonical(header.canonical_key()).map_err(|_| Damage::Header)?;
    if key.digest() != digest {
        return Err(Damage::OtherKey);
    }
    let piece = Piece::verify(slot, done, &key, blocks);
    piece.map_err(|corruption| Damage::of_header(&corruption.source))?;
    let said = Held { payload_bytes: header.payload_bytes(), write_id: header.write_id() };
    if said == held { Ok(header) } else { Err(Damage::Index) }
}

fn wait(wake: Option<BorrowedFd<'_>>, asked_again: bool) {
    let timeout = if asked_again { Duration::from_millis(1) } else { LOOK_EVERY };
    match wake {
        Some(fd) => {
            let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout);
        }
        None => thread::sleep(timeout),
    }
}

/// Polls until every removal has reached the medium. False: not in time, or some did not.
pub(super) fn settle(tier: &mut dyn Tier) -> bool {
    let by_ns = now_ns().saturating_add(STALL_NS);
    let mut completions = Vec::new();
    while now_ns() < by_ns {
        let wake_ns = tier.poll(now_ns(), &Unguarded, &mut completions);
        completions.clear();
        if tier.stats().removals_pending == 0 {
            return true;
        }
        wait(tier.wake_fd(), wake_ns.is_some());
    }
    false
}
