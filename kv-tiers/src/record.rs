//! A chunk in memory as it stands on every medium: header, then payload.

use std::ops::Range;

use kv_chunk::{BLOCK_BYTES, ChunkHeader, ChunkKey, Digest, HEADER_BYTES, HeaderError, WriteId};
use thiserror::Error;

use crate::{ReadDone, Slot};

/// Bytes of a record on a medium: header, payload, padding to 4 KiB.
pub const fn record_bytes(payload_bytes: u64) -> u64 {
    (HEADER_BYTES as u64 + payload_bytes).next_multiple_of(4096)
}

/// The payload bytes that `blocks` of 1 MiB name in a payload of `payload_bytes`. An end past the payload means "to its
/// end"; a range that is empty or starts past the end names no bytes.
pub fn piece_range(payload_bytes: u64, blocks: &Range<u32>) -> Range<u64> {
    let offset = |block: u32| (u64::from(block) * BLOCK_BYTES as u64).min(payload_bytes);
    let start = offset(blocks.start);
    start..offset(blocks.end).max(start)
}

/// A whole chunk in a slot, immutable: what a write takes, and what staged or host-cached chunks are read from.
#[derive(Debug)]
pub struct Record {
    slot: Slot,
    header: ChunkHeader,
}

impl Record {
    /// Copies `payload` into `slot` behind its new header. A payload that does not fit gives the slot back.
    pub fn encode(
        mut slot: Slot,
        key: &ChunkKey,
        write_id: WriteId,
        payload: &[u8],
    ) -> Result<Self, Slot> {
        let Ok(header) = ChunkHeader::new(key, write_id, payload) else { return Err(slot) };
        let padded = record_bytes(payload.len() as u64);
        if padded > slot.len() as u64 {
            return Err(slot);
        }
        slot[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        slot[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
        Ok(Self::padded(slot, header))
    }

    /// A record whose header and payload already stand in `slot`.
    ///
    /// Padding reaches the medium: it is zeroed so that no other chunk's bytes leak into it.
    pub(crate) fn padded(slot: Slot, header: ChunkHeader) -> Self {
        let mut record = Self { slot, header };
        let payload_end = HEADER_BYTES + record.payload_len();
        let padded_end = payload_end.next_multiple_of(4096).min(record.slot.len());
        record.slot[payload_end..padded_end].fill(0);
        record
    }

    /// The header.
    pub fn header(&self) -> &ChunkHeader {
        &self.header
    }

    /// Index key.
    pub fn digest(&self) -> Digest {
        self.header.digest()
    }

    /// The payload.
    pub fn payload(&self) -> &[u8] {
        &self.slot[HEADER_BYTES..HEADER_BYTES + self.payload_len()]
    }

    /// The bytes a tier stores: header, payload, zero padding to 4 KiB.
    pub fn stored_bytes(&self) -> &[u8] {
        let end = (HEADER_BYTES + self.payload_len()).next_multiple_of(4096);
        &self.slot[..end]
    }

    /// The slot, for drivers that need its place in the arena.
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    fn payload_len(&self) -> usize {
        usize::try_from(self.header.payload_bytes()).expect("a payload in memory fits usize")
    }
}

/// Bytes that a read brought and that proved to be what was asked for.
#[derive(Debug)]
pub struct Piece {
    slot: Slot,
    header: ChunkHeader,
    done: ReadDone,
}

/// Why the bytes of a read are not served. Always a miss for that tier, counted with its reason.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("chunk {digest} failed verification")]
pub struct Corruption {
    /// The chunk asked for.
    pub digest: Digest,
    /// What did not match.
    pub source: HeaderError,
}

impl Piece {
    /// The header that came with the bytes.
    pub fn header(&self) -> &ChunkHeader {
        &self.header
    }

    /// Checks a completed read of `blocks` (as asked for) of `key`'s chunk: header, canonical key, that all the bytes
    /// asked for came, and their checksums. On failure the slot is released.
    pub fn verify(
        slot: Slot,
        done: ReadDone,
        key: &ChunkKey,
        blocks: &Range<u32>,
    ) -> Result<Self, Corruption> {
        match check(&slot, done, key, blocks) {
            Ok(header) => Ok(Self { slot, header, done }),
            Err(source) => Err(Corruption { digest: key.digest(), source }),
        }
    }

    /// Which staging of the chunk these bytes belong to: pieces of different stagings must not be combined.
    pub fn write_id(&self) -> WriteId {
        self.header.write_id()
    }

    /// Offset of these bytes in the payload.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.done.first_block) * BLOCK_BYTES as u64
    }

    /// Length of the chunk's whole payload.
    pub fn chunk_payload_bytes(&self) -> u64 {
        self.header.payload_bytes()
    }

    /// The verified bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.slot[HEADER_BYTES..HEADER_BYTES + self.done.payload_bytes]
    }

    /// The record, if these are all the bytes of the chunk.
    pub fn into_record(self) -> Option<Record> {
        let whole = self.done.first_block == 0
            && self.done.payload_bytes as u64 == self.header.payload_bytes();
        whole.then(|| Record::padded(self.slot, self.header))
    }
}

fn check(
    slot: &Slot,
    done: ReadDone,
    key: &ChunkKey,
    blocks: &Range<u32>,
) -> Result<ChunkHeader, HeaderError> {
    let header = ChunkHeader::parse(slot)?;
    header.verify_key(key)?;
    let asked = piece_range(header.payload_bytes(), blocks);
    let (expected, found) = (asked.end - asked.start, done.payload_bytes as u64);
    // A shorter transfer can end at a block's end with right checksums: its length must be the one asked for.
    if found != expected || done.first_block != blocks.start {
        return Err(HeaderError::PayloadLength { expected, found });
    }
    let end = HEADER_BYTES.saturating_add(done.payload_bytes);
    let payload =
        slot.get(HEADER_BYTES..end).ok_or(HeaderError::Truncated { bytes: slot.len() })?;
    if !payload.is_empty() {
        header.verify_blocks(done.first_block, payload)?;
    }
    Ok(header)
}
