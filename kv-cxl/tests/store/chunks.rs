//! Chunks that say who they are, and a tier that is driven one op at a time.

#![expect(clippy::expect_used, reason = "a failed set-up is a failed test")]
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::sync::Arc;

use kv_chunk::{ChunkKey, Digest, Namespace, WriteId};
use kv_tiers::{
    Arena, ArenaConfig, Completion, Op, OpId, Piece, Purpose, ReadOp, Record, Tier, TierError,
    Unguarded, WriteOp,
};

pub(crate) fn key(number: u32) -> ChunkKey {
    let word = |text: &str| text.to_owned();
    let namespace = Namespace {
        model: word("model"),
        weights: word("weights"),
        dtype: word("bf16"),
        layout: word("NHD"),
        chunk_tokens: 256,
        serde: word("raw"),
        hash_algorithm: word("blake3"),
        hash_seed: word("0"),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: word("engine"),
        engine_major: 1,
        extra: std::collections::BTreeMap::new(),
    };
    let hash = [number.to_le_bytes(), [0x5a; 4]].concat();
    ChunkKey::new(&namespace, 0, 0, &hash, b"").expect("a small key")
}

pub(crate) fn digest(number: u32) -> Digest {
    key(number).digest()
}

/// One staging of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Content {
    pub(crate) number: u32,
    pub(crate) version: u32,
    pub(crate) bytes: u32,
}

impl Content {
    pub(crate) fn write_id(self) -> WriteId {
        let word = |value: u32, shift: u32| u128::from(value) << shift;
        WriteId::new(word(self.number, 64) | word(self.version, 32) | word(self.bytes, 0))
    }

    pub(crate) fn named(write_id: WriteId) -> Self {
        let word =
            |shift: u32| u32::try_from(write_id.get() >> shift & 0xffff_ffff).expect("32 bits");
        Self { number: word(64), version: word(32), bytes: word(0) }
    }

    pub(crate) fn payload(self) -> Vec<u8> {
        let mut state = u64::from(self.number) << 32 | u64::from(self.version);
        let words = (0..self.bytes.div_ceil(8)).flat_map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state ^ state >> 29).to_le_bytes()
        });
        words.take(self.bytes as usize).collect()
    }
}

/// A tier and what it needs.
pub(crate) struct Driver {
    pub(crate) tier: Box<dyn Tier>,
    arena: Arc<Arena>,
    ops: u64,
}

impl Driver {
    pub(crate) fn new(tier: Box<dyn Tier>, slot_bytes: usize) -> Self {
        let arena = Arena::new(ArenaConfig::new(slot_bytes, 2)).expect("a small arena");
        Self { tier, arena, ops: 0 }
    }

    /// How the write ended, and which chunks made room for it.
    pub(crate) fn write(&mut self, content: Content) -> (Result<(), TierError>, Vec<Digest>) {
        let slot = self.arena.try_take().expect("a free slot");
        let record =
            Record::encode(slot, &key(content.number), content.write_id(), &content.payload());
        let record = Arc::new(record.map_err(|_| "too large").expect("it fits a slot"));
        self.ops += 1;
        self.tier
            .submit(Op::Write(WriteOp { id: OpId(self.ops), record }), 0)
            .expect("it is taken");
        let (mut completions, mut evicted, mut ended) = (Vec::new(), Vec::new(), None);
        while ended.is_none() {
            self.tier.poll(0, &Unguarded, &mut completions);
            for completion in completions.drain(..) {
                match completion {
                    Completion::Write { result, .. } => ended = Some(result),
                    Completion::Evicted { digest } => evicted.push(digest),
                    other => panic!("{other:?}"),
                }
            }
        }
        (ended.expect("it ended"), evicted)
    }

    /// What is stored under `number`, verified: `Ok(None)` if nothing is.
    pub(crate) fn read(&mut self, number: u32) -> Result<Option<Content>, String> {
        let slot = self.arena.try_take().expect("a free slot");
        self.ops += 1;
        let (blocks, purpose) = (0..u32::MAX, Purpose::Use);
        let digest = digest(number);
        let read = ReadOp { id: OpId(self.ops), digest, blocks: blocks.clone(), slot, purpose };
        self.tier.submit(Op::Read(read), 0).expect("it is taken");
        let mut completions = Vec::new();
        while completions.is_empty() {
            self.tier.poll(0, &Unguarded, &mut completions);
        }
        let Some(Completion::Read { slot, result, .. }) = completions.pop() else { panic!() };
        let done = match result {
            Ok(done) => done,
            Err(TierError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let piece = Piece::verify(slot, done, &key(number), &blocks);
        let piece = piece.map_err(|error| format!("chunk {number}: {error:?}"))?;
        let content = Content::named(piece.write_id());
        if content.number != number || content.payload() != piece.bytes() {
            return Err(format!("chunk {number} has the bytes of another one"));
        }
        Ok(Some(content))
    }
}
