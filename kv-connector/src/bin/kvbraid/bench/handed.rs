//! One step whose bytes are taken where they landed, as fio leaves its own.

use std::time::Instant;

use kv_chunk::{BLOCK_BYTES, ChunkKey, block_crc};
use kv_connector::{Arrived, Engine, Outcome, Want, replay::fill};

use super::{
    counters::cpu_time,
    rig::{CHUNK_BYTES, Shot},
};
use crate::failure::Failure;

/// Checksums that the blocks of every chunk must have, worked out from what the chunks' keys say their bytes are.
#[derive(Debug)]
pub(super) struct Expected(Vec<Vec<u32>>);

impl Expected {
    pub(super) fn of(keys: &[ChunkKey]) -> Self {
        let mut payload = vec![0; CHUNK_BYTES];
        let of_chunk = |key: &ChunkKey| {
            fill(key.digest(), &mut payload);
            payload.chunks(BLOCK_BYTES).map(block_crc).collect()
        };
        Self(keys.iter().map(of_chunk).collect())
    }

    /// The engine has checked the bytes against the header's checksums; are those the right ones?
    fn is_met(&self, chunk: usize, arrived: &Arrived) -> bool {
        let first = arrived.payload_offset() / BLOCK_BYTES;
        let blocks = arrived.bytes().len().div_ceil(BLOCK_BYTES);
        (first..first + blocks).all(|block| {
            let found = u32::try_from(block).ok().and_then(|it| arrived.header().block_crc(it));
            found.is_some() && found == self.0[chunk].get(block).copied()
        })
    }
}

/// Reads all chunks as one step.
pub(super) fn load(
    engine: &Engine,
    keys: &[ChunkKey],
    expected: &Expected,
) -> Result<Shot, Failure> {
    let lease = engine.lookup(keys);
    let mut wants: Vec<Want<'_>> = keys.iter().map(|key| Want::handed(key, CHUNK_BYTES)).collect();
    let (mut shot, mut wrong) = (Shot::default(), 0_u64);
    let (cpu_before, began) = (cpu_time(), Instant::now());
    shot.add(&engine.load_handing(&lease, &mut wants, |places, arrived| {
        wrong += u64::from(!places.iter().all(|&place| expected.is_met(place, &arrived)));
    }));
    shot.seconds = began.elapsed().as_secs_f64();
    shot.cpu_s = (cpu_time() - cpu_before).as_secs_f64();
    let missed = wants.iter().find_map(|want| match want.outcome {
        Outcome::Miss(why) => Some(why),
        Outcome::Hit(_) => None,
    });
    match missed {
        Some(why) => Err(Failure::failed(format!("a chunk was not delivered: {why:?}"))),
        None if wrong > 0 => Err(Failure::failed(format!("{wrong} pieces were WRONG"))),
        None => Ok(shot),
    }
}
