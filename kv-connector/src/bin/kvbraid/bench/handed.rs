//! What bytes must be that are taken where they landed, and not copied to be looked at.

use kv_chunk::{BLOCK_BYTES, ChunkKey, block_crc};
use kv_connector::{Arrived, replay::fill};

use super::rig::CHUNK_BYTES;

/// Checksums that the blocks of every chunk must have, worked out from what the chunks' keys say their bytes are.
#[derive(Debug)]
pub(super) struct Expected(Vec<Vec<u32>>);

impl Expected {
    pub(super) fn of(keys: &[ChunkKey]) -> Self {
        let mut payload = vec![0; CHUNK_BYTES];
        let of_chunk = |key: &ChunkKey| {
            fill(key.digest(), &mut payload);
            payload.chunks(BLOCK_BYTES).map(block_crc).collect()
        };
        Self(keys.iter().map(of_chunk).collect())
    }

    /// The engine has checked the bytes against the header's checksums; are those the right ones?
    pub(super) fn is_met(&self, chunk: usize, arrived: &Arrived) -> bool {
        let first = arrived.payload_offset() / BLOCK_BYTES;
        let blocks = arrived.bytes().len().div_ceil(BLOCK_BYTES);
        (first..first + blocks).all(|block| {
            let found = u32::try_from(block).ok().and_then(|it| arrived.header().block_crc(it));
            found.is_some() && found == self.0[chunk].get(block).copied()
        })
    }
}
