//! Operations on a tier and what comes back.

use std::{ops::Range, sync::Arc};

use kv_chunk::{Digest, HEADER_BYTES};

use crate::{Record, Slot, TierError, piece_range};

/// Names an op among those in flight on one tier; the caller chooses it and gets it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// An operation. The tier owns its buffer until the completion.
#[derive(Debug)]
pub enum Op {
    /// Read a chunk or a piece of it.
    Read(ReadOp),
    /// Write a chunk.
    Write(WriteOp),
}

impl Op {
    /// The caller's name for it.
    pub fn id(&self) -> OpId {
        match self {
            Self::Read(read) => read.id,
            Self::Write(write) => write.id,
        }
    }

    /// Which chunk it is about.
    pub fn digest(&self) -> Digest {
        match self {
            Self::Read(read) => read.digest,
            Self::Write(write) => write.record.digest(),
        }
    }
}

/// Reads the header and some payload blocks of a chunk into a slot.
///
/// The header lands in the slot's first 4 KiB, the first block asked for directly behind it: a read of all blocks
/// leaves the record as it is stored. A range that names no block reads the header alone.
#[derive(Debug)]
pub struct ReadOp {
    /// Comes back in the completion.
    pub id: OpId,
    /// Which chunk.
    pub digest: Digest,
    /// Payload blocks of 1 MiB, as [`piece_range`](crate::piece_range) counts them: an end past the chunk's last block
    /// means "to the end".
    pub blocks: Range<u32>,
    /// Where the bytes land.
    pub slot: Slot,
    /// What for.
    pub purpose: Purpose,
}

impl ReadOp {
    /// Bytes that it puts into the slot: header and payload, of a chunk whose payload is so long.
    pub fn bytes_in_slot(&self, payload_bytes: u64) -> u64 {
        let range = piece_range(payload_bytes, &self.blocks);
        HEADER_BYTES as u64 + (range.end - range.start)
    }
}

/// What a read is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// Somebody wants the chunk: it is the most recently used now.
    #[default]
    Use,
    /// To see whether it is whole, or whose it is: it leaves no younger than it was.
    Look,
}

/// Writes a chunk. It becomes readable when the write completes without error.
#[derive(Debug)]
pub struct WriteOp {
    /// Comes back in the completion.
    pub id: OpId,
    /// Header and payload; shared with the other replicas' writes.
    pub record: Arc<Record>,
}

/// What a read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadDone {
    /// First block asked for, and so the first in the slot.
    pub first_block: u32,
    /// Payload bytes behind the header in the slot.
    pub payload_bytes: usize,
}

/// What [`Tier::poll`](crate::Tier::poll) reports.
///
/// `Read` and `Write` answer an op; `Evicted` and `Lost` say that a chunk which was readable no longer is.
#[derive(Debug)]
pub enum Completion {
    /// A read ended; the slot comes back in any case (its content is unspecified after an error).
    Read {
        /// As submitted.
        id: OpId,
        /// As submitted.
        digest: Digest,
        /// The buffer.
        slot: Slot,
        /// What landed, or why not.
        result: Result<ReadDone, TierError>,
    },
    /// A write ended; on success the chunk is readable.
    Write {
        /// As submitted.
        id: OpId,
        /// Which chunk.
        digest: Digest,
        /// Done, or why not.
        result: Result<(), TierError>,
    },
    /// A chunk was dropped to make room, after the guard confirmed it.
    Evicted {
        /// Which chunk.
        digest: Digest,
    },
    /// A chunk that was readable is gone (out-of-band deletion, unreadable medium).
    Lost {
        /// Which chunk.
        digest: Digest,
        /// Why.
        error: TierError,
    },
}

impl Completion {
    /// The op that this answers, if it answers one.
    pub fn id(&self) -> Option<OpId> {
        match self {
            Self::Read { id, .. } | Self::Write { id, .. } => Some(*id),
            Self::Evicted { .. } | Self::Lost { .. } => None,
        }
    }
}

/// An op that was not accepted, given back whole.
#[derive(Debug)]
pub struct Rejected {
    /// The op.
    pub op: Op,
    /// Why.
    pub reason: RejectReason,
}

/// Why an op was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// As many ops are in flight as the tier allows: submit again after a completion.
    QueueFull,
    /// The tier is closed.
    Closed,
    /// The record does not fit this tier, or the blocks to read do not fit the slot: they never will.
    TooLarge,
}
