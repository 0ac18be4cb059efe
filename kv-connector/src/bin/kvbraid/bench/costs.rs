//! What a step costs the processors whatever it is read from: measured over memory that no cache holds.

use std::hint::black_box;

use kv_chunk::{BLOCK_BYTES, block_crc};

use super::{counters::cpu_time, rig::CHUNK_BYTES};

const CHUNKS: usize = 64;
const ROUNDS: usize = 4;

/// CPU time of checking 1 GB as every read is checked.
pub(super) fn crc_s_per_gb() -> f64 {
    let bytes = memory();
    per_gb(|| {
        for block in bytes.chunks(BLOCK_BYTES) {
            black_box(block_crc(black_box(block)));
        }
    })
}

/// CPU time of copying 1 GB, chunk by chunk, from the engine's memory to the caller's.
pub(super) fn copy_s_per_gb() -> f64 {
    let (from, mut to) = (memory(), memory());
    per_gb(|| {
        for (from, to) in from.chunks(CHUNK_BYTES).zip(to.chunks_mut(CHUNK_BYTES)) {
            to.copy_from_slice(black_box(from));
            black_box(to);
        }
    })
}

/// Written everywhere: pages that were never touched are all the same.
fn memory() -> Vec<u8> {
    (0..=u8::MAX).cycle().take(CHUNKS * CHUNK_BYTES).collect()
}

fn per_gb(mut pass: impl FnMut()) -> f64 {
    let before = cpu_time();
    for _ in 0..ROUNDS {
        pass();
    }
    (cpu_time() - before).as_secs_f64() * 1e9 / (ROUNDS * CHUNKS * CHUNK_BYTES) as f64
}
