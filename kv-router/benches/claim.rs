//! What routing costs: a claim and its completion, per chunk.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kv_router::{ChunkSpec, PoolConfig, StepPool, Tail, TierId, TierMask};

fn step(chunks: u16, tiers: u8, ranks: u16) -> Vec<ChunkSpec> {
    (0..chunks)
        .map(|i| ChunkSpec {
            tiers: TierMask::all(tiers),
            blocks: 20,
            bytes: 20 << 20,
            rank: i * ranks / chunks,
        })
        .collect()
}

/// Claims in turn, each tier with its window full, until the step is finished.
fn run(pool: StepPool) -> StepPool {
    let tiers = pool.config().tiers;
    while !pool.is_finished() {
        for tier in (0..tiers).map(TierId) {
            if let Some(claim) = pool.claim(tier) {
                let _ = black_box(pool.complete(claim));
            }
        }
    }
    pool
}

fn claim(c: &mut Criterion) {
    let mut group = c.benchmark_group("claim");
    for (name, chunks, tiers, ranks) in [
        ("230_chunks_2_tiers", 230, 2, 1),
        ("230_chunks_2_tiers_4_ranks", 230, 2, 4),
        ("10000_chunks_2_tiers", 10_000, 2, 1),
        ("10000_chunks_8_tiers_8_ranks", 10_000, 8, 8),
    ] {
        let specs = step(chunks, tiers, ranks);
        for (tail_name, tail) in [("whole", Tail::Whole), ("tail", Tail::SplitAndDuplicate)] {
            let mut config = PoolConfig::new(tiers);
            config.tail = tail;
            let build = || StepPool::new(&specs, &config).expect("a valid step");
            group.throughput(Throughput::Elements(u64::from(chunks)));
            group.bench_function(format!("{name}_{tail_name}"), |b| {
                b.iter_batched(build, run, BatchSize::SmallInput);
            });
        }
        group.bench_function(format!("{name}_build"), |b| {
            let config = PoolConfig::new(tiers);
            b.iter(|| StepPool::new(black_box(&specs), &config));
        });
    }
    group.finish();
}

criterion_group!(benches, claim);
criterion_main!(benches);
