//! Namespaces and keys for unit tests, and for the integration tests, which share this file.

#![allow(dead_code, clippy::allow_attributes, reason = "each test crate uses some of it")]

use std::collections::BTreeMap;

use kv_chunk::{ChunkKey, Namespace};

/// All of a namespace but its model.
pub(crate) fn namespace(model: &str) -> Namespace {
    Namespace {
        model: model.to_owned(),
        weights: "1".to_owned(),
        dtype: "bf16".to_owned(),
        layout: "NHD".to_owned(),
        chunk_tokens: 16,
        serde: "raw".to_owned(),
        hash_algorithm: "xxh3".to_owned(),
        hash_seed: "0".to_owned(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "test".to_owned(),
        engine_major: 1,
        extra: BTreeMap::new(),
    }
}

/// Chunk `n` of one model.
pub(crate) fn key(n: u64) -> ChunkKey {
    ChunkKey::new(&namespace("test"), 0, 0, &n.to_le_bytes(), b"").unwrap()
}
