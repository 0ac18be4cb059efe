//! Sizes against published figures.

use kv_chunk::{ChunkLayout, LayerCache, LayoutError, ObjectGroup, preset};

const KIB: u64 = 1024;

#[track_caller]
fn check(layout: &ChunkLayout, per_token: u64) {
    assert_eq!(layout.bytes_per_token(), Ok(per_token));
    let one_rank: u64 =
        (0..layout.groups.len()).map(|group| layout.chunk_bytes(group, 1).unwrap()).sum();
    assert_eq!(one_rank, per_token * u64::from(layout.chunk_tokens));
}

#[test]
fn presets_have_the_published_bytes_per_token() {
    check(&preset::llama3_8b(), 128 * KIB);
    check(&preset::llama3_70b(), 320 * KIB);
    check(&preset::qwen2_5_14b(), 192 * KIB);
    check(&preset::qwen2_5_32b(), 256 * KIB);
    check(&preset::qwen3_14b(), 160 * KIB);
    check(&preset::qwen3_32b(), 256 * KIB);
    check(&preset::deepseek_v3(), 61 * 576 * 2);
    check(&preset::gpt_oss_120b(), 72 * KIB);
    check(&preset::gemma3_27b(), 496 * KIB);
}

#[test]
fn a_context_of_64k_tokens_of_llama_8b_is_8_gib() {
    assert_eq!(preset::llama3_8b().bytes_per_token().unwrap() * (64 << 10), 8 << 30);
}

#[test]
fn heads_divide_over_ranks_and_replicate_beyond_their_number() {
    let layout = preset::llama3_70b();
    assert_eq!(layout.chunk_bytes(0, 1), Ok(80 << 20));
    assert_eq!(layout.chunk_bytes(0, 4), Ok(20 << 20));
    assert_eq!(layout.chunk_bytes(0, 8), Ok(10 << 20));
    assert_eq!(layout.chunk_bytes(0, 16), Ok(10 << 20));
    assert_eq!(
        layout.chunk_bytes(0, 3),
        Err(LayoutError::HeadSplit { kv_heads: 8, tensor_parallel: 3 })
    );
}

#[test]
fn a_latent_is_the_same_on_every_rank() {
    let layout = preset::deepseek_v3();
    assert_eq!(layout.chunk_bytes(0, 8), layout.chunk_bytes(0, 1));
}

#[test]
fn a_recurrent_state_counts_per_chunk_and_not_per_token() {
    let cache = LayerCache::State { state_bytes: 1000 };
    let groups = vec![ObjectGroup { layers: 3, cache, window_tokens: None }];
    let layout = ChunkLayout { groups, element_bits: 16, chunk_tokens: 256 };
    assert_eq!(layout.bytes_per_token(), Ok(0));
    assert_eq!(layout.chunk_bytes(0, 1), Ok(3000));
    assert_eq!(layout.chunk_bytes(0, 4), Ok(750));
}

#[test]
fn elements_may_be_smaller_than_a_byte() {
    let fp8 = ChunkLayout { element_bits: 8, ..preset::llama3_8b() };
    assert_eq!(fp8.bytes_per_token(), Ok(64 * KIB));
    let fp4 = ChunkLayout { element_bits: 4, ..preset::llama3_8b() };
    assert_eq!(fp4.bytes_per_token(), Ok(32 * KIB));
}

#[test]
fn impossible_numbers_are_errors() {
    let layout = preset::llama3_8b();
    assert_eq!(layout.chunk_bytes(1, 1), Err(LayoutError::NoGroup { object_group: 1, groups: 1 }));
    assert_eq!(layout.chunk_bytes(0, 0), Err(LayoutError::Zero { field: "tensor_parallel" }));
    let zero = ChunkLayout { element_bits: 0, ..layout.clone() };
    assert_eq!(zero.bytes_per_token(), Err(LayoutError::Zero { field: "element_bits" }));
    let cache = LayerCache::Heads { kv_heads: u32::MAX, head_dim: u32::MAX };
    let groups = vec![ObjectGroup { layers: u32::MAX, cache, window_tokens: None }];
    let huge = ChunkLayout { groups, ..layout };
    assert_eq!(huge.bytes_per_token(), Err(LayoutError::TooLarge));
    assert_eq!(huge.chunk_bytes(0, 1), Err(LayoutError::TooLarge));
}
