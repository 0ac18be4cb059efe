//! The format of a reusable KV cache chunk: who it belongs to, how it is laid out, and how a reader knows it is whole.
//!
//! *Is*: [`Namespace`] (all that decides the bytes besides the tokens), [`ChunkKey`], its 128-bit [`Digest`], the
//! 4 KiB [`ChunkHeader`] that precedes every payload, CRC-32C checksums of each 1 MiB block, and [`ChunkLayout`]
//! (bytes per token of a model).
//!
//! *Is not*: I/O, a clock, or threads. The payload is opaque here.

#![forbid(unsafe_code)]

mod crc;
mod digest;
mod header;
mod key;
pub mod le;
mod namespace;

pub use crate::{
    crc::{BLOCK_BYTES, block_count, block_crc},
    digest::{Digest, WriteId},
    header::{ChunkHeader, HEADER_BYTES, HeaderError, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES},
    key::{ChunkKey, KeyError, KeyParts},
    namespace::Namespace,
};
