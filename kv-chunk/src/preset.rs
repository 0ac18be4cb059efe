//! Layouts of well-known models, from their published configurations: bf16 elements, 256 tokens per chunk.

use crate::{ChunkLayout, LayerCache, ObjectGroup};

/// Llama 3 and 3.1, 8B: 128 KiB per token.
pub fn llama3_8b() -> ChunkLayout {
    uniform(32, GQA_8X128)
}

/// Llama 3, 3.1 and 3.3, 70B: 320 KiB per token.
pub fn llama3_70b() -> ChunkLayout {
    uniform(80, GQA_8X128)
}

/// Qwen2.5 14B: 192 KiB per token.
pub fn qwen2_5_14b() -> ChunkLayout {
    uniform(48, GQA_8X128)
}

/// Qwen2.5 32B: 256 KiB per token.
pub fn qwen2_5_32b() -> ChunkLayout {
    uniform(64, GQA_8X128)
}

/// Qwen3 14B: 160 KiB per token.
pub fn qwen3_14b() -> ChunkLayout {
    uniform(40, GQA_8X128)
}

/// Qwen3 32B: 256 KiB per token.
pub fn qwen3_32b() -> ChunkLayout {
    uniform(64, GQA_8X128)
}

/// DeepSeek V3 and R1 (multi-head latent attention, rank 512 plus 64 rotary): 70,272 bytes per token.
pub fn deepseek_v3() -> ChunkLayout {
    uniform(61, LayerCache::Latent { elements: 512 + 64 })
}

/// gpt-oss 120B: full attention (group 0) alternating with a 128-token window (group 1); 36 KiB per token each.
pub fn gpt_oss_120b() -> ChunkLayout {
    let cache = LayerCache::Heads { kv_heads: 8, head_dim: 64 };
    hybrid(cache, [(18, None), (18, Some(128))])
}

/// Gemma 3 27B: one full-attention layer in six (group 0, 80 KiB per token), the others with a 1024-token window
/// (group 1, 416 KiB per token).
pub fn gemma3_27b() -> ChunkLayout {
    let cache = LayerCache::Heads { kv_heads: 16, head_dim: 128 };
    hybrid(cache, [(10, None), (52, Some(1024))])
}

const GQA_8X128: LayerCache = LayerCache::Heads { kv_heads: 8, head_dim: 128 };

fn uniform(layers: u32, cache: LayerCache) -> ChunkLayout {
    bf16(vec![ObjectGroup { layers, cache, window_tokens: None }])
}

fn hybrid(cache: LayerCache, groups: [(u32, Option<u32>); 2]) -> ChunkLayout {
    bf16(
        groups.map(|(layers, window_tokens)| ObjectGroup { layers, cache, window_tokens }).to_vec(),
    )
}

fn bf16(groups: Vec<ObjectGroup>) -> ChunkLayout {
    ChunkLayout { groups, element_bits: 16, chunk_tokens: 256 }
}
