//! Keys for the tests.

use std::collections::BTreeMap;

use kv_chunk::{ChunkKey, Namespace};

/// The key of chunk `number`.
pub(crate) fn key(number: u64) -> ChunkKey {
    let namespace = Namespace {
        model: "test".into(),
        weights: "none".into(),
        dtype: "u8".into(),
        layout: "opaque".into(),
        chunk_tokens: 256,
        serde: "raw".into(),
        hash_algorithm: "counter".into(),
        hash_seed: "0".into(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "test".into(),
        engine_major: 1,
        extra: BTreeMap::new(),
    };
    ChunkKey::new(&namespace, 0, 0, &number.to_le_bytes(), b"").unwrap()
}
