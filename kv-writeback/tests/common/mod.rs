//! Keys and payloads whose content is known from a number.

use kv_chunk::{ChunkKey, Namespace};

/// The key of chunk `number`.
pub(crate) fn key(number: u32) -> ChunkKey {
    let namespace = Namespace {
        model: "model".into(),
        weights: "r1".into(),
        dtype: "bf16".into(),
        layout: "NHD".into(),
        chunk_tokens: 256,
        serde: "raw".into(),
        hash_algorithm: "sha256".into(),
        hash_seed: "none".into(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "test".into(),
        engine_major: 1,
        extra: Default::default(),
    };
    ChunkKey::new(&namespace, 0, 0, &u64::from(number).to_le_bytes(), b"").expect("a valid key")
}

/// What one staging of chunk `number` holds: another staging holds something else.
pub(crate) fn payload(number: u32, write_id: u128) -> Vec<u8> {
    let seed = write_id.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u128::from(number));
    seed.to_le_bytes().repeat(1 + number as usize % 5)
}
