//! What each tier delivers alone: the yardstick of a comparison.

use std::time::{Duration, Instant};

use kv_chunk::ChunkKey;

use crate::{
    ByteSize, Config, Engine, TierId, TierMask, Want,
    replay::{
        ReplayError, Scratch, Watch, Workload,
        content::{fill, wrong_bytes},
    },
};

const FLUSH_DEADLINE: Duration = Duration::from_secs(120);
const CHUNKS_MIN: usize = 32;

/// Reads of each tier: what else the machine does makes a tier look slower than it is, so the best of them counts.
const READS: usize = 2;

/// Each tier's rate when it alone serves one large step of whole chunks, in bytes/s.
pub(crate) fn rates(
    config: &Config,
    workload: &Workload,
    bytes: ByteSize,
    watch: &dyn Watch,
) -> Result<Vec<f64>, ReplayError> {
    let scratch = Scratch::new(config)?;
    let mut config = scratch.config().clone();
    // Nothing may be served from memory.
    config.engine.host_cache = ByteSize(0);
    config.engine.cache_stores = false;
    let chunk_bytes = workload.chunk_bytes();
    let chunks = usize::try_from(bytes.0).unwrap_or(usize::MAX) / chunk_bytes;
    let keys = workload.spare_keys(chunks.max(CHUNKS_MIN));
    let engine = Engine::open(config.clone())?;
    store_all(&engine, &keys, chunk_bytes, config.engine.staging);
    let mut buffer = vec![0; keys.len() * chunk_bytes];
    let mut rates = Vec::new();
    for (tier, index) in config.tiers.iter().zip(0..) {
        let mut best: f64 = 0.0;
        for _ in 0..READS {
            let (rate, delivered) = read_all(&engine, &keys, TierId(index), &mut buffer);
            if delivered != keys.len() {
                return Err(ReplayError::Alone {
                    name: tier.name.clone(),
                    delivered: delivered as u64,
                    wanted: keys.len() as u64,
                });
            }
            best = best.max(rate);
        }
        rates.push(best);
        if !watch.step() {
            return Err(ReplayError::Stopped);
        }
    }
    engine.close(FLUSH_DEADLINE);
    Ok(rates)
}

/// Stores in parts that staging holds with ease: under pressure it would give up replicas.
fn store_all(engine: &Engine, keys: &[ChunkKey], chunk_bytes: usize, staging: ByteSize) {
    let mut payload = vec![0; chunk_bytes];
    let part = usize::try_from(staging.0).unwrap_or(usize::MAX) / 2 / chunk_bytes;
    for keys in keys.chunks(part.max(1)) {
        for key in keys {
            fill(key.digest(), &mut payload);
            // Refused: the read will miss it, and that is reported.
            let _ = engine.store(key, &payload);
        }
        engine.flush(FLUSH_DEADLINE);
    }
}

/// Loads all of `keys` from one tier; its rate and how many chunks came whole and right.
fn read_all(engine: &Engine, keys: &[ChunkKey], tier: TierId, buffer: &mut [u8]) -> (f64, usize) {
    buffer.fill(0);
    let lease = engine.lookup(keys);
    let destinations = buffer.chunks_exact_mut(buffer.len() / keys.len());
    let mut wants: Vec<Want<'_>> = keys
        .iter()
        .zip(destinations)
        .map(|(key, dest)| {
            let mut want = Want::new(key, dest);
            want.tiers = TierMask::only(tier);
            want
        })
        .collect();
    let began = Instant::now();
    let report = engine.load(&lease, &mut wants);
    let rate = report.storage_bytes as f64 / began.elapsed().as_secs_f64();
    let right =
        |want: &&Want<'_>| want.outcome.is_hit() && wrong_bytes(want.key.digest(), want.dest) == 0;
    (rate, wants.iter().filter(right).count())
}
