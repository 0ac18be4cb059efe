//! What a look-up costs: 100 chunks at a time, of 100 000 resident ones, leased and released.

use std::{hint::black_box, os::fd::BorrowedFd};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_chunk::{ChunkKey, Digest, KeySpace, Namespace, WriteId};
use kv_connector::{ByteSize, Config, Engine, TierConfig};
use kv_tiers::{
    Capabilities, Completion, EvictionGuard, Held, Op, RejectReason, Rejected, Tier, TierStats,
};

const RESIDENT: u64 = 100_000;
const AT_ONCE: usize = 100;

/// Names chunks and holds no byte of them: a look-up asks for nothing else.
#[derive(Debug)]
struct IndexOnly(Vec<Digest>);

impl Tier for IndexOnly {
    fn name(&self) -> &str {
        "index"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(1 << 20, 1)
    }
    fn submit(&mut self, op: Op, _now_ns: u64) -> Result<(), Rejected> {
        Err(Rejected { op, reason: RejectReason::QueueFull })
    }
    fn poll(
        &mut self,
        _now_ns: u64,
        _guard: &dyn EvictionGuard,
        _completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        None
    }
    fn hold_writes(&mut self, _hold: bool) {}
    fn contains(&self, _digest: Digest) -> Option<Held> {
        None
    }
    fn remove(&mut self, _digest: Digest, _now_ns: u64) -> bool {
        false
    }
    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        let held = Held { payload_bytes: 1, write_id: WriteId::new(1) };
        self.0.iter().for_each(|digest| visit(*digest, held));
    }
    fn in_flight(&self) -> usize {
        0
    }
    fn stats(&self) -> TierStats {
        TierStats::default()
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn close(&mut self) {}
}

fn keys(range: std::ops::Range<u64>) -> Vec<ChunkKey> {
    let space = KeySpace::new(&Namespace {
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
    });
    let space = space.expect("a valid namespace");
    range.map(|n| space.key(0, 0, &n.to_le_bytes(), b"").expect("a valid key")).collect()
}

fn lookup(criterion: &mut Criterion) {
    let mut config = Config::new(vec![TierConfig::memory("index", ByteSize::gib(1))]);
    config.engine.chunk_bytes_max = ByteSize::kib(64);
    config.engine.host_cache = ByteSize::mib(1);
    config.engine.staging = ByteSize::mib(1);
    let resident = keys(0..RESIDENT);
    let arenas = Engine::arenas(&config).expect("a few MiB");
    let tier = IndexOnly(resident.iter().map(ChunkKey::digest).collect());
    let engine = Engine::with_tiers(config, arenas, vec![Box::new(tier)]).expect("it opens");
    let absent = keys(RESIDENT..RESIDENT + 10_000);
    let mut group = criterion.benchmark_group("lookup");
    group.throughput(Throughput::Elements(AT_ONCE as u64));
    for (name, keys) in [("hits", resident), ("misses", absent)] {
        let mut start = 0;
        group.bench_function(format!("{name}_{AT_ONCE}_of_{RESIDENT}"), |bencher| {
            bencher.iter(|| {
                // Another place each time: an index of this size does not fit a cache.
                start = (start + 7919) % (keys.len() - AT_ONCE);
                let lease = engine.lookup(&keys[start..start + AT_ONCE]);
                black_box(lease.prefix_hits())
            });
        });
    }
    group.finish();
}

criterion_group!(benches, lookup);
criterion_main!(benches);
