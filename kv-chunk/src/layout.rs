//! Sizes: bytes per token and per chunk of a model's KV cache. Nothing here decides what is stored; it plans for it.

use thiserror::Error;

/// Why a size has no answer.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum LayoutError {
    /// A number that must be at least 1 is 0.
    #[error("`{field}` is 0: give at least 1")]
    Zero {
        /// Which.
        field: &'static str,
    },
    /// No such object group.
    #[error("object group {object_group} of a layout with {groups}")]
    NoGroup {
        /// The index asked for.
        object_group: usize,
        /// Groups there are.
        groups: usize,
    },
    /// KV heads neither divide over the ranks nor replicate evenly.
    #[error(
        "{kv_heads} KV heads do not split over {tensor_parallel} ranks: one must be a multiple of the other"
    )]
    HeadSplit {
        /// KV heads of a layer.
        kv_heads: u32,
        /// Tensor-parallel size.
        tensor_parallel: u32,
    },
    /// The size does not fit 64 bits.
    #[error("the layout is larger than 2^64 bytes")]
    TooLarge,
}

/// What one layer of an object group caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerCache {
    /// Keys and values of `kv_heads` heads per token (MHA, GQA, MQA).
    Heads {
        /// KV heads.
        kv_heads: u32,
        /// Elements of a key, and of a value, per head.
        head_dim: u32,
    },
    /// One latent vector per token that stands for keys and values of all heads (MLA); every tensor-parallel rank
    /// needs all of it.
    Latent {
        /// Elements: the compressed KV rank plus the rotary part.
        elements: u32,
    },
    /// A recurrent state, saved once per chunk whatever its tokens (linear attention, state-space layers).
    State {
        /// Bytes of one layer's state over all ranks, in the type the engine keeps it in.
        state_bytes: u64,
    },
}

/// Layers that share a cache layout and are stored as one object per chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ObjectGroup {
    /// Layers in it.
    pub layers: u32,
    /// What each caches.
    pub cache: LayerCache,
    /// Sliding window in tokens: only the chunks that reach into it are needed. `None` is full attention.
    pub window_tokens: Option<u32>,
}

/// The KV cache layout of a model: its object groups, element size and chunk length.
///
/// ```
/// use kv_chunk::{ChunkLayout, preset};
///
/// let llama = ChunkLayout { chunk_tokens: 256, ..preset::llama3_70b() };
/// assert_eq!(llama.bytes_per_token()?, 320 << 10);
/// assert_eq!(llama.chunk_bytes(0, 4)?, 20 << 20); // one rank of four
/// # Ok::<(), kv_chunk::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChunkLayout {
    /// Object groups; their index is the `object_group` of a key.
    pub groups: Vec<ObjectGroup>,
    /// Bits of a cached element: 16 for bf16, 8 for fp8, 4 for fp4. Scales stored beside the elements are not counted.
    pub element_bits: u32,
    /// Tokens per chunk.
    pub chunk_tokens: u32,
}

impl ChunkLayout {
    /// Bytes that one token adds to the cache, all groups and layers, over all ranks without replicas. A recurrent
    /// state does not grow with tokens and counts nothing.
    pub fn bytes_per_token(&self) -> Result<u64, LayoutError> {
        let elements = self.groups.iter().try_fold(0_u128, |sum, group| {
            let per_layer = u128::from(token_elements(group.cache, 1)?);
            Ok(sum + u128::from(group.layers) * per_layer)
        })?;
        self.element_bytes(elements)
    }

    /// Payload bytes of one chunk of `object_group` on each rank of a `tensor_parallel`-way engine: heads are divided
    /// over the ranks (or replicated, if ranks outnumber heads), a latent is replicated, a state is divided.
    pub fn chunk_bytes(
        &self,
        object_group: usize,
        tensor_parallel: u32,
    ) -> Result<u64, LayoutError> {
        let no_group = LayoutError::NoGroup { object_group, groups: self.groups.len() };
        let group = self.groups.get(object_group).ok_or(no_group)?;
        nonzero("chunk_tokens", self.chunk_tokens)?;
        nonzero("tensor_parallel", tensor_parallel)?;
        if let LayerCache::State { state_bytes } = group.cache {
            let per_rank = state_bytes.div_ceil(u64::from(tensor_parallel));
            return per_rank.checked_mul(u64::from(group.layers)).ok_or(LayoutError::TooLarge);
        }
        let per_layer = u128::from(token_elements(group.cache, tensor_parallel)?);
        let elements = per_layer * u128::from(group.layers);
        self.element_bytes(
            elements.checked_mul(u128::from(self.chunk_tokens)).ok_or(LayoutError::TooLarge)?,
        )
    }

    fn element_bytes(&self, elements: u128) -> Result<u64, LayoutError> {
        nonzero("element_bits", self.element_bits)?;
        let bits =
            elements.checked_mul(u128::from(self.element_bits)).ok_or(LayoutError::TooLarge)?;
        u64::try_from(bits.div_ceil(8)).map_err(|_| LayoutError::TooLarge)
    }
}

/// Elements that one token adds to one layer on one rank.
fn token_elements(cache: LayerCache, tensor_parallel: u32) -> Result<u64, LayoutError> {
    match cache {
        LayerCache::Heads { kv_heads, head_dim } => {
            nonzero("kv_heads", kv_heads)?;
            let heads = rank_heads(kv_heads, tensor_parallel)?;
            (u64::from(heads) * u64::from(head_dim)).checked_mul(2).ok_or(LayoutError::TooLarge)
        }
        LayerCache::Latent { elements } => Ok(u64::from(elements)),
        LayerCache::State { .. } => Ok(0),
    }
}

fn rank_heads(kv_heads: u32, tensor_parallel: u32) -> Result<u32, LayoutError> {
    if kv_heads.is_multiple_of(tensor_parallel) {
        Ok(kv_heads / tensor_parallel)
    } else if tensor_parallel.is_multiple_of(kv_heads) {
        Ok(1)
    } else {
        Err(LayoutError::HeadSplit { kv_heads, tensor_parallel })
    }
}

fn nonzero(field: &'static str, value: u32) -> Result<(), LayoutError> {
    if value == 0 { Err(LayoutError::Zero { field }) } else { Ok(()) }
}
