//! Keys and payloads that say who they are: a chunk served in place of another one is seen.

use std::{collections::BTreeMap, ops::Range};

use kv_chunk::{ChunkKey, Namespace, WriteId};

/// One staging of a chunk: its number, the version of its content, its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Content {
    pub(super) number: u32,
    pub(super) version: u32,
    pub(super) payload_bytes: u32,
}

impl Content {
    pub(super) fn new(number: u32, version: u32, payload_bytes: u64) -> Self {
        let payload_bytes = u32::try_from(payload_bytes).expect("the suite's payloads are small");
        Self { number, version, payload_bytes }
    }

    pub(super) fn key(self) -> ChunkKey {
        key(self.number)
    }

    /// Says all of `self`, so that what a read brought can be recomputed.
    pub(super) fn write_id(self) -> WriteId {
        let Self { number, version, payload_bytes } = self;
        WriteId::new(
            u128::from(number) << 64 | u128::from(version) << 32 | u128::from(payload_bytes),
        )
    }

    /// The content that `write_id` names, if it is one of chunk `number`.
    pub(super) fn named(write_id: WriteId, number: u32) -> Option<Self> {
        let field = |shift: u32| u32::try_from(write_id.get() >> shift & u128::from(u32::MAX)).ok();
        let content = Self { number, version: field(32)?, payload_bytes: field(0)? };
        (content.write_id() == write_id).then_some(content)
    }

    pub(super) fn payload(self) -> Vec<u8> {
        self.bytes(0..self.payload_bytes as usize)
    }

    /// A part of the payload.
    pub(super) fn bytes(self, range: Range<usize>) -> Vec<u8> {
        let seed = u64::from(self.number) << 32 | u64::from(self.version);
        let start = fastrand::Rng::with_seed(seed).u64(..);
        let first = range.start / 8;
        let words = (first..range.end.div_ceil(8)).map(|word| {
            start.wrapping_add(word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
        });
        let mut bytes: Vec<u8> = words.flatten().collect();
        bytes.truncate(range.end - first * 8);
        bytes.drain(..range.start - first * 8);
        bytes
    }
}

pub(super) fn key(number: u32) -> ChunkKey {
    let word = || String::from("conformance");
    let namespace = Namespace {
        model: word(),
        weights: word(),
        dtype: word(),
        layout: word(),
        chunk_tokens: 1,
        serde: word(),
        hash_algorithm: word(),
        hash_seed: word(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: word(),
        engine_major: 1,
        extra: BTreeMap::new(),
    };
    ChunkKey::new(&namespace, 0, 0, &u64::from(number).to_le_bytes(), b"")
        .expect("short texts and 8 bytes of hash make a key")
}
