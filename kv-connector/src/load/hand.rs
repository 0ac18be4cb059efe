//! Verified bytes that the caller takes as they are, where they landed.

use std::sync::Arc;

use kv_chunk::ChunkHeader;
use kv_tiers::{Piece, Record};

/// Verified bytes of a wanted chunk, in the engine's memory.
///
/// They stay where they are until this is dropped, so that a device can copy them from there. Until then one slot of
/// the read buffer serves no other read: a load whose slots are all held waits for one, until its deadline.
#[derive(Debug)]
pub struct Arrived(Bytes);

#[derive(Debug)]
enum Bytes {
    Piece(Piece),
    Record(Arc<Record>),
}

impl Arrived {
    pub(super) fn piece(piece: Piece) -> Self {
        Self(Bytes::Piece(piece))
    }

    pub(super) fn record(record: Arc<Record>) -> Self {
        Self(Bytes::Record(record))
    }

    /// The chunk's header: its key, and the checksums that the bytes were found to have.
    pub fn header(&self) -> &ChunkHeader {
        match &self.0 {
            Bytes::Piece(piece) => piece.header(),
            Bytes::Record(record) => record.header(),
        }
    }

    /// Where in the payload they begin.
    pub fn payload_offset(&self) -> usize {
        match &self.0 {
            Bytes::Piece(piece) => usize::try_from(piece.payload_offset()).unwrap_or(usize::MAX),
            Bytes::Record(_) => 0,
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Bytes::Piece(piece) => piece.bytes(),
            Bytes::Record(record) => record.payload(),
        }
    }
}

/// Who takes what is handed over: places of wants with one key in the caller's slice, and the bytes.
pub(super) type Taker<'t> = &'t mut dyn FnMut(&[usize], Arrived);
