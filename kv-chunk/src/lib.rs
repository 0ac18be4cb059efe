//! The format of a reusable KV cache chunk: who it belongs to, how it is laid out, and how a reader knows it is whole.
//!
//! *Is*: [`Namespace`] (all that decides the bytes besides the tokens), [`ChunkKey`], its 128-bit [`Digest`], the
//! 4 KiB [`ChunkHeader`] that precedes every payload, CRC-32C checksums of each 1 MiB block, and [`ChunkLayout`]
//! (bytes per token of a model).
//!
//! *Is not*: I/O, a clock, or threads. The payload is opaque here. `docs/format.md` draws the bytes.
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use kv_chunk::{ChunkHeader, KeySpace, Namespace, WriteId};
//!
//! let space = KeySpace::new(&Namespace {
//!     model: "meta-llama/Meta-Llama-3-8B".into(),
//!     weights: "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920".into(),
//!     dtype: "bf16".into(),
//!     layout: "NHD".into(),
//!     chunk_tokens: 256,
//!     serde: "raw".into(),
//!     hash_algorithm: "blake3".into(),
//!     hash_seed: "0".into(),
//!     tensor_parallel: 1,
//!     pipeline_parallel: 1,
//!     context_parallel: 1,
//!     engine: "vllm".into(),
//!     engine_major: 0,
//!     extra: BTreeMap::new(),
//! })?;
//! let key = space.key(0, 0, &[7; 32], b"tenant")?;
//!
//! // The writer: header, then payload.
//! let payload = vec![42; 3 << 20];
//! let written = ChunkHeader::new(&key, WriteId::new(1), &payload)?;
//! let mut stored = written.as_bytes().to_vec();
//! stored.extend(&payload);
//!
//! // The reader: is it whole, is it this key's, are these the bytes?
//! let read = ChunkHeader::parse(&stored)?;
//! read.verify_key(&key)?;
//! read.verify_payload(&stored[kv_chunk::HEADER_BYTES..])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod crc;
mod digest;
mod header;
mod key;
mod layout;
pub mod le;
mod namespace;
pub mod preset;
mod wire;

pub use crate::{
    crc::{BLOCK_BYTES, block_count, block_crc},
    digest::{Digest, WriteId},
    header::{
        ChunkHeader, HEADER_BYTES, HEADER_VERSION, HeaderError, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES,
    },
    key::{ChunkKey, KEY_VERSION, KeyError, KeyParts, KeySpace},
    layout::{ChunkLayout, LayerCache, LayoutError, ObjectGroup},
    namespace::Namespace,
};
