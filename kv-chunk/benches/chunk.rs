//! What keys, headers and checksums cost.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_chunk::{
    BLOCK_BYTES, ChunkHeader, ChunkKey, HEADER_BYTES, KeySpace, Namespace, WriteId, block_crc,
};

fn namespace() -> Namespace {
    Namespace {
        model: "meta-llama/Meta-Llama-3-70B".into(),
        weights: "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920".into(),
        dtype: "bf16".into(),
        layout: "NHD".into(),
        chunk_tokens: 256,
        serde: "raw".into(),
        hash_algorithm: "blake3".into(),
        hash_seed: "0".into(),
        tensor_parallel: 4,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "vllm".into(),
        engine_major: 0,
        extra: Default::default(),
    }
}

fn keys(criterion: &mut Criterion) {
    let namespace = namespace();
    let space = KeySpace::new(&namespace).expect("valid");
    let mut group = criterion.benchmark_group("key");
    group.bench_function("from_space", |b| {
        b.iter(|| space.key(3, 0, black_box(&[7; 32]), b"tenant"));
    });
    group.bench_function("from_namespace", |b| {
        b.iter(|| ChunkKey::new(&namespace, 3, 0, black_box(&[7; 32]), b"tenant"));
    });
    let key = space.key(3, 0, &[7; 32], b"tenant").expect("valid");
    group.bench_function("from_canonical", |b| {
        b.iter(|| ChunkKey::from_canonical(black_box(key.canonical())));
    });
    group.finish();
}

fn headers(criterion: &mut Criterion) {
    let key = ChunkKey::new(&namespace(), 3, 0, &[7; 32], b"tenant").expect("valid");
    let payload = vec![42; 20 * BLOCK_BYTES];
    let header = ChunkHeader::new(&key, WriteId::new(1), &payload).expect("fits");
    let mut group = criterion.benchmark_group("header");
    // Drivers parse from page-aligned slots; where source and copy lie decides how fast `memcpy` is.
    let mut slot = vec![0; 2 * HEADER_BYTES];
    let aligned = slot.as_ptr().align_offset(HEADER_BYTES);
    slot[aligned..aligned + HEADER_BYTES].copy_from_slice(header.as_bytes());
    group.bench_function("parse", |b| {
        b.iter(|| ChunkHeader::parse(black_box(&slot[aligned..])));
    });
    group.bench_function("verify_key", |b| {
        b.iter(|| header.verify_key(black_box(&key)));
    });
    group.bench_function("new_empty", |b| {
        b.iter(|| ChunkHeader::new(black_box(&key), WriteId::new(1), &[]));
    });
    group.throughput(Throughput::Bytes(payload.len() as u64));
    group.bench_function("verify_payload_20_mib", |b| {
        b.iter(|| header.verify_payload(black_box(&payload)));
    });
    group.finish();
}

fn checksums(criterion: &mut Criterion) {
    let block = vec![42; BLOCK_BYTES];
    let mut group = criterion.benchmark_group("crc");
    group.throughput(Throughput::Bytes(BLOCK_BYTES as u64));
    group.bench_function("block_1_mib", |b| {
        b.iter(|| block_crc(black_box(&block)));
    });
    group.finish();
}

criterion_group!(chunk, keys, headers, checksums);
criterion_main!(chunk);
