//! Reads and writes of chunks on their way: copies that are made a part at a time.

use kv_chunk::HEADER_BYTES;
use kv_tiers::{ReadDone, ReadOp, TierError, WriteOp, piece_range};

use crate::{Extent, FastTierError, Medium, MediumReader, tier::Chunk};

/// A read and how far it is.
#[derive(Debug)]
pub(crate) struct PendingRead {
    pub(crate) op: ReadOp,
    /// The chunk as it was when the read was accepted.
    chunk: Option<Chunk>,
    /// Bytes of the slot that are there.
    copied: usize,
}

impl PendingRead {
    pub(crate) fn new(op: ReadOp, chunk: Option<Chunk>) -> Self {
        Self { op, chunk, copied: 0 }
    }

    /// Header and payload, as they land.
    fn bytes(&self) -> usize {
        let payload = |chunk: &Chunk| {
            let range = piece_range(chunk.held.payload_bytes, &self.op.blocks);
            usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
        };
        self.chunk.as_ref().map_or(0, |chunk| HEADER_BYTES.saturating_add(payload(chunk)))
    }

    /// Copies up to `bytes_max` more, in one request; gives how many.
    pub(crate) fn copy(
        &mut self,
        medium: &dyn Medium,
        bytes_max: usize,
    ) -> Result<usize, FastTierError> {
        self.copy_some(bytes_max, |offset, into| medium.read(offset, into))
    }

    /// Copies all of it, on a thread that may wait; gives in how many requests.
    pub(crate) fn copy_all(&mut self, medium: &dyn MediumReader) -> Result<u64, FastTierError> {
        let mut requests = 0;
        while self.copy_some(usize::MAX, |offset, into| medium.read(offset, into))? > 0 {
            requests += 1;
        }
        Ok(requests)
    }

    fn copy_some(
        &mut self,
        bytes_max: usize,
        read: impl FnOnce(u64, &mut [u8]) -> Result<(), FastTierError>,
    ) -> Result<usize, FastTierError> {
        let Some(chunk) = &self.chunk else { return Ok(0) };
        let skipped = piece_range(chunk.held.payload_bytes, &self.op.blocks).start;
        let start = self.copied;
        // What stands together comes in one request.
        let in_header = start < HEADER_BYTES && skipped > 0;
        let end = if in_header { HEADER_BYTES } else { self.bytes() };
        let end = end.min(start.saturating_add(bytes_max));
        let before = if start < HEADER_BYTES { 0 } else { skipped };
        let offset = chunk.place.extent.offset + start as u64 + before;
        if start == end {
            return Ok(0);
        }
        read(offset, &mut self.op.slot[start..end])?;
        self.copied = end;
        Ok(end - start)
    }

    /// How it ended, once all is there.
    pub(crate) fn done(&self) -> Option<Result<ReadDone, TierError>> {
        if self.chunk.is_none() {
            return Some(Err(TierError::NotFound { digest: self.op.digest }));
        }
        let payload_bytes = self.bytes().saturating_sub(HEADER_BYTES);
        let done = ReadDone { first_block: self.op.blocks.start, payload_bytes };
        (self.copied == self.bytes()).then_some(Ok(done))
    }
}

/// A write that has a place, and how far it is.
#[derive(Debug)]
pub(crate) struct Writing {
    pub(crate) op: WriteOp,
    pub(crate) entry: u32,
    pub(crate) extent: Extent,
    /// Bytes of the record that are there.
    pub(crate) copied: usize,
}

impl Writing {
    /// Copies up to `bytes_max` more; gives how many.
    pub(crate) fn copy(
        &mut self,
        medium: &mut dyn Medium,
        bytes_max: usize,
    ) -> Result<usize, FastTierError> {
        let rest = &self.op.record.stored_bytes()[self.copied..];
        let some = &rest[..rest.len().min(bytes_max)];
        medium.write(self.extent.offset + self.copied as u64, some)?;
        self.copied += some.len();
        Ok(some.len())
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.copied == self.op.record.stored_bytes().len()
    }
}
