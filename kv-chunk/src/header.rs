//! The 4 KiB block before every payload.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use crate::{
    BLOCK_BYTES, ChunkKey, Digest, WriteId, block_count, block_crc,
    key::check_canonical,
    le::{Le16, Le32, Le64},
};

/// Bytes of a chunk header.
pub const HEADER_BYTES: usize = 4096;
/// Longest canonical key.
pub const MAX_KEY_BYTES: usize = 1920;
/// Largest payload: 512 blocks of 1 MiB.
pub const MAX_PAYLOAD_BYTES: u64 = (MAX_BLOCKS * BLOCK_BYTES) as u64;
/// The header version that this crate writes and reads.
pub const HEADER_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"KVBCHUNK";
const MAX_BLOCKS: usize = 512;

/// The bytes on the medium. `docs/format.md` draws them. The first three fields and the way the checksum is computed
/// are the same in every version, so that a reader can tell a newer header from a damaged one.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: Le32,
    header_crc: Le32,
    digest: [u8; 16],
    write_id: [u8; 16],
    payload_bytes: Le64,
    block_bytes: Le32,
    key_bytes: Le16,
    flags: Le16,
    reserved: [u8; 64],
    key: [u8; MAX_KEY_BYTES],
    block_crcs: [Le32; MAX_BLOCKS],
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES && align_of::<RawHeader>() == 1);

/// Why a header or the bytes behind it are not what the reader asked for. Every variant is a miss.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum HeaderError {
    /// Shorter than a header.
    #[error("{bytes} bytes are no header of {HEADER_BYTES}")]
    Truncated {
        /// Bytes given.
        bytes: usize,
    },
    /// No chunk starts here.
    #[error("no chunk magic")]
    Magic,
    /// Written by a version that this one does not know: leave it alone.
    #[error("chunk header version {version}, this reader knows {HEADER_VERSION}")]
    Version {
        /// The version found.
        version: u32,
    },
    /// The header's own checksum does not match.
    #[error("header checksum mismatch")]
    HeaderCrc,
    /// A field holds an impossible value.
    #[error("impossible {field}")]
    Field {
        /// Which.
        field: &'static str,
    },
    /// Another chunk's header: the canonical key differs.
    #[error("another chunk's key is stored here")]
    Key,
    /// A payload block's checksum does not match.
    #[error("checksum mismatch in payload block {block}")]
    BlockCrc {
        /// Index of the block.
        block: u32,
    },
    /// More or fewer payload bytes than the header says.
    #[error("payload has {found} bytes where the header says {expected}")]
    PayloadLength {
        /// Per the header.
        expected: u64,
        /// Given.
        found: u64,
    },
    /// A payload larger than the format holds.
    #[error("payload of {bytes} bytes, at most {MAX_PAYLOAD_BYTES} fit a chunk")]
    PayloadTooLarge {
        /// Its length.
        bytes: u64,
    },
}

/// A checked header. It owns its 4 KiB.
#[derive(Clone)]
pub struct ChunkHeader(Box<RawHeader>);

impl ChunkHeader {
    /// The header of `payload` stored under `key`; computes the checksum of every block.
    pub fn new(key: &ChunkKey, write_id: WriteId, payload: &[u8]) -> Result<Self, HeaderError> {
        let payload_bytes = payload.len() as u64;
        if payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(HeaderError::PayloadTooLarge { bytes: payload_bytes });
        }
        let mut raw: Box<RawHeader> = bytemuck::zeroed_box();
        raw.magic = MAGIC;
        raw.version = HEADER_VERSION.into();
        raw.digest = key.digest().to_bytes();
        raw.write_id = write_id.get().to_le_bytes();
        raw.payload_bytes = payload_bytes.into();
        raw.block_bytes = u32::try_from(BLOCK_BYTES).expect("1 MiB fits u32").into();
        let canonical = key.canonical();
        raw.key_bytes = u16::try_from(canonical.len()).expect("a key fits its area").into();
        raw.key[..canonical.len()].copy_from_slice(canonical);
        for (slot, block) in raw.block_crcs.iter_mut().zip(payload.chunks(BLOCK_BYTES)) {
            *slot = block_crc(block).into();
        }
        raw.header_crc = block_crc(bytemuck::bytes_of(&*raw)).into();
        Ok(Self(raw))
    }

    /// A header from the first 4 KiB of `bytes`, checked: magic, checksum, version, then every field. What is accepted
    /// is exactly what [`new`](Self::new) can have written: unused bytes are zero, the digest is the key's.
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let head =
            bytes.get(..HEADER_BYTES).ok_or(HeaderError::Truncated { bytes: bytes.len() })?;
        let mut raw: Box<RawHeader> = bytemuck::zeroed_box();
        bytemuck::bytes_of_mut(&mut *raw).copy_from_slice(head);
        if raw.magic != MAGIC {
            return Err(HeaderError::Magic);
        }
        let stored = std::mem::replace(&mut raw.header_crc, 0.into());
        if stored.get() != block_crc(bytemuck::bytes_of(&*raw)) {
            return Err(HeaderError::HeaderCrc);
        }
        raw.header_crc = stored;
        if raw.version.get() != HEADER_VERSION {
            return Err(HeaderError::Version { version: raw.version.get() });
        }
        raw.check_fields()?;
        Ok(Self(raw))
    }

    /// The bytes to store.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::bytes_of(&*self.0)
    }

    /// Index key of the chunk.
    pub fn digest(&self) -> Digest {
        Digest::from_bytes(self.0.digest)
    }

    /// Which staging of the chunk this is.
    pub fn write_id(&self) -> WriteId {
        WriteId::new(u128::from_le_bytes(self.0.write_id))
    }

    /// Length of the payload.
    pub fn payload_bytes(&self) -> u64 {
        self.0.payload_bytes.get()
    }

    /// Number of checksummed blocks.
    pub fn blocks(&self) -> u32 {
        u32::try_from(block_count(self.payload_bytes())).expect("at most 512 blocks")
    }

    /// The canonical key stored with the chunk.
    pub fn canonical_key(&self) -> &[u8] {
        &self.0.key[..usize::from(self.0.key_bytes.get())]
    }

    /// Fails unless this is `key`'s chunk.
    pub fn verify_key(&self, key: &ChunkKey) -> Result<(), HeaderError> {
        if self.canonical_key() == key.canonical() { Ok(()) } else { Err(HeaderError::Key) }
    }

    /// CRC-32C of a block of the payload, as it was when the chunk was written; `None` past the last.
    pub fn block_crc(&self, block: u32) -> Option<u32> {
        (block < self.blocks()).then(|| self.0.block_crcs[block as usize].get())
    }

    /// Fails unless `bytes` are exactly the payload blocks from `first_block` on, whole and unchanged.
    pub fn verify_blocks(&self, first_block: u32, bytes: &[u8]) -> Result<(), HeaderError> {
        let start = u64::from(first_block) * BLOCK_BYTES as u64;
        let end = start + bytes.len() as u64;
        let on_boundary = bytes.len().is_multiple_of(BLOCK_BYTES) || end == self.payload_bytes();
        if end > self.payload_bytes() || !on_boundary {
            return Err(HeaderError::PayloadLength { expected: self.payload_bytes(), found: end });
        }
        for (block, stored) in (first_block..).zip(bytes.chunks(BLOCK_BYTES)) {
            if block_crc(stored) != self.0.block_crcs[block as usize].get() {
                return Err(HeaderError::BlockCrc { block });
            }
        }
        Ok(())
    }

    /// Fails unless `payload` is the whole payload, unchanged.
    pub fn verify_payload(&self, payload: &[u8]) -> Result<(), HeaderError> {
        let found = payload.len() as u64;
        if found != self.payload_bytes() {
            return Err(HeaderError::PayloadLength { expected: self.payload_bytes(), found });
        }
        self.verify_blocks(0, payload)
    }
}

impl fmt::Debug for ChunkHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkHeader")
            .field("digest", &self.digest())
            .field("write_id", &self.write_id())
            .field("payload_bytes", &self.payload_bytes())
            .finish_non_exhaustive()
    }
}

impl RawHeader {
    fn check_fields(&self) -> Result<(), HeaderError> {
        let payload_bytes = self.payload_bytes.get();
        if self.block_bytes.get() as usize != BLOCK_BYTES {
            return Err(HeaderError::Field { field: "block_bytes" });
        }
        if payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(HeaderError::Field { field: "payload_bytes" });
        }
        let Some((canonical, behind_key)) =
            self.key.split_at_checked(usize::from(self.key_bytes.get()))
        else {
            return Err(HeaderError::Field { field: "key_bytes" });
        };
        if check_canonical(canonical).is_err() {
            return Err(HeaderError::Field { field: "key" });
        }
        if Digest::of(canonical).to_bytes() != self.digest {
            return Err(HeaderError::Field { field: "digest" });
        }
        let blocks = usize::try_from(block_count(payload_bytes)).expect("at most 512 blocks");
        if !all_zero(bytemuck::cast_slice(&self.block_crcs[blocks..])) {
            return Err(HeaderError::Field { field: "block_crcs" });
        }
        if self.flags.get() != 0 || !all_zero(&self.reserved) || !all_zero(behind_key) {
            return Err(HeaderError::Field { field: "reserved bytes" });
        }
        Ok(())
    }
}

/// Without early exit, so that it compiles to wide loads: some 3 KiB are checked on every read.
fn all_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |seen, byte| seen | byte) == 0
}
