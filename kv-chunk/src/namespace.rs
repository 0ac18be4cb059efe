//! What decides a chunk's bytes besides its tokens.

use std::collections::BTreeMap;

/// All that decides a chunk's bytes besides the tokens. Two namespaces that differ in any field share no chunk.
///
/// Every field has a meaning for the engine that fills it; `extra` takes what this version has no field for, so that
/// an unknown property still separates chunks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Model identity, such as a hub name or a hash of its configuration; not the display name it is served under.
    pub model: String,
    /// Revision or hash of the weights.
    pub weights: String,
    /// KV cache element type, such as `bf16` or `fp8_e4m3`.
    pub dtype: String,
    /// Attention and block layout and instruction-set packing, such as `NHD` or `HND/amx`.
    pub layout: String,
    /// Tokens per chunk.
    pub chunk_tokens: u32,
    /// Serialisation of the payload (`raw` if none).
    pub serde: String,
    /// Algorithm of the chunk hash.
    pub hash_algorithm: String,
    /// Seed of the chunk hash.
    pub hash_seed: String,
    /// Tensor-parallel size.
    pub tensor_parallel: u32,
    /// Pipeline-parallel size.
    pub pipeline_parallel: u32,
    /// Context-parallel size.
    pub context_parallel: u32,
    /// Serving engine.
    pub engine: String,
    /// Its major version.
    pub engine_major: u32,
    /// Anything else that decides the bytes.
    pub extra: BTreeMap<String, String>,
}

impl Namespace {
    /// Appends the canonical encoding: each field as its length (u32, little-endian) and bytes, in declaration order.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        for text in [&self.model, &self.weights, &self.dtype, &self.layout] {
            put(out, text.as_bytes());
        }
        put(out, &self.chunk_tokens.to_le_bytes());
        for text in [&self.serde, &self.hash_algorithm, &self.hash_seed] {
            put(out, text.as_bytes());
        }
        for number in [self.tensor_parallel, self.pipeline_parallel, self.context_parallel] {
            put(out, &number.to_le_bytes());
        }
        put(out, self.engine.as_bytes());
        put(out, &self.engine_major.to_le_bytes());
        put(out, &u32::try_from(self.extra.len()).unwrap_or(u32::MAX).to_le_bytes());
        for (name, value) in &self.extra {
            put(out, name.as_bytes());
            put(out, value.as_bytes());
        }
    }
}

/// Appends one length-prefixed field.
pub(crate) fn put(out: &mut Vec<u8>, field: &[u8]) {
    out.extend_from_slice(&u32::try_from(field.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(field);
}
