//! `[namespace]`: what decides the bytes of the chunks besides their tokens, for adapters that make keys.

use std::collections::BTreeMap;

use kv_chunk::Namespace;
use serde::{Deserialize, Serialize};

/// `[namespace]`: every field of [`Namespace`], each mandatory but `extra`. Chunks of another namespace are never served.
///
/// Adapters of serving engines take it from here; an engine itself, whose callers bring whole keys, does not look at it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct NamespaceSection {
    /// Identity of the model.
    pub model: String,
    /// Revision of its weights.
    pub weights: String,
    /// Type of the cached numbers.
    pub dtype: String,
    /// Layout of a block of cache.
    pub layout: String,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// What was done to the bytes before they came here, such as `raw` or `fp8`.
    pub serde: String,
    /// What makes the chunk hashes.
    pub hash_algorithm: String,
    /// With which seed; `none` if it has none.
    pub hash_seed: String,
    /// Ranks.
    pub tensor_parallel: u32,
    /// Stages.
    pub pipeline_parallel: u32,
    /// Ranks that share a sequence.
    pub context_parallel: u32,
    /// The serving engine.
    pub engine: String,
    /// Its major version.
    pub engine_major: u32,
    /// Whatever else.
    #[serde(default)]
    pub extra: BTreeMap<String, String>,
}

impl From<NamespaceSection> for Namespace {
    fn from(section: NamespaceSection) -> Self {
        Self {
            model: section.model,
            weights: section.weights,
            dtype: section.dtype,
            layout: section.layout,
            chunk_tokens: section.chunk_tokens,
            serde: section.serde,
            hash_algorithm: section.hash_algorithm,
            hash_seed: section.hash_seed,
            tensor_parallel: section.tensor_parallel,
            pipeline_parallel: section.pipeline_parallel,
            context_parallel: section.context_parallel,
            engine: section.engine,
            engine_major: section.engine_major,
            extra: section.extra,
        }
    }
}
