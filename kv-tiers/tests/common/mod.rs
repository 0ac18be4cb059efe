//! Keys, records and small steps for the tests.

#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses some of these")]
#![allow(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use kv_chunk::{ChunkKey, Digest, Namespace, WriteId};
use kv_tiers::{
    Arena, ArenaConfig, Completion, Corruption, Op, OpId, Piece, Purpose, ReadDone, ReadOp, Record,
    Slot, Tier, TierError, Unguarded, WriteOp,
};

/// The key of chunk `number`.
pub(crate) fn key(number: u64) -> ChunkKey {
    let namespace = Namespace {
        model: "test".into(),
        weights: "none".into(),
        dtype: "u8".into(),
        layout: "opaque".into(),
        chunk_tokens: 256,
        serde: "raw".into(),
        hash_algorithm: "counter".into(),
        hash_seed: "0".into(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "test".into(),
        engine_major: 1,
        extra: BTreeMap::new(),
    };
    ChunkKey::new(&namespace, 0, 0, &number.to_le_bytes(), b"").unwrap()
}

pub(crate) fn digest(number: u64) -> Digest {
    key(number).digest()
}

/// Bytes that no other chunk has.
pub(crate) fn payload(number: u64, bytes: usize) -> Vec<u8> {
    let mut payload = vec![0; bytes];
    fastrand::Rng::with_seed(number).fill(&mut payload);
    payload
}

pub(crate) fn arena(slots: usize) -> Arc<Arena> {
    Arena::new(ArenaConfig::new(3 << 20, slots)).unwrap()
}

pub(crate) fn write_op(arena: &Arc<Arena>, number: u64, payload: &[u8]) -> Op {
    let slot = arena.try_take().unwrap();
    let record = Record::encode(slot, &key(number), WriteId::new(number.into()), payload).unwrap();
    Op::Write(WriteOp { id: OpId(number), record: Arc::new(record) })
}

pub(crate) fn read_op(arena: &Arc<Arena>, number: u64, blocks: Range<u32>) -> Op {
    let slot = arena.try_take().unwrap();
    Op::Read(ReadOp {
        id: OpId(number),
        digest: digest(number),
        blocks,
        slot,
        purpose: Purpose::Use,
    })
}

/// One poll.
pub(crate) fn poll(tier: &mut dyn Tier, now_ns: u64) -> (Vec<Completion>, Option<u64>) {
    let mut completions = Vec::new();
    let next_ns = tier.poll(now_ns, &Unguarded, &mut completions);
    (completions, next_ns)
}

/// Polls until nothing is in flight, going from one time the tier names to the next.
pub(crate) fn settle(tier: &mut dyn Tier, now_ns: &mut u64) -> Vec<Completion> {
    let mut all = Vec::new();
    loop {
        let (mut completions, next_ns) = poll(tier, *now_ns);
        all.append(&mut completions);
        if tier.in_flight() == 0 {
            return all;
        }
        *now_ns = (*now_ns).max(next_ns.unwrap());
    }
}

/// Writes one chunk in virtual time.
pub(crate) fn write(
    tier: &mut dyn Tier,
    arena: &Arc<Arena>,
    number: u64,
    payload: &[u8],
) -> Result<(), TierError> {
    tier.submit(write_op(arena, number, payload), 0).unwrap();
    let completions = settle(tier, &mut 0);
    let result = completions.into_iter().find_map(|completion| match completion {
        Completion::Write { result, .. } => Some(result),
        _ => None,
    });
    result.unwrap()
}

/// Reads one whole chunk in virtual time.
pub(crate) fn read(
    tier: &mut dyn Tier,
    arena: &Arc<Arena>,
    number: u64,
) -> Result<(Slot, ReadDone), TierError> {
    tier.submit(read_op(arena, number, 0..u32::MAX), 0).unwrap();
    let completions = settle(tier, &mut 0);
    let result = completions.into_iter().find_map(|completion| match completion {
        Completion::Read { result, slot, .. } => Some(result.map(|done| (slot, done))),
        _ => None,
    });
    result.unwrap()
}

pub(crate) fn verify((slot, done): (Slot, ReadDone), number: u64) -> Result<Piece, Corruption> {
    Piece::verify(slot, done, &key(number), &(0..u32::MAX))
}
