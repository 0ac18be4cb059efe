//! A tier that serves requests, a few ops at a time, and compares every byte that it brings.

use std::{
    collections::{HashMap, HashSet},
    os::fd::AsFd,
    sync::Arc,
};

use kv_tiers::{
    Arena, ArenaConfig, Completion, NvmeConfig, NvmeTier, Op, OpId, Piece, Purpose, ReadDone,
    ReadOp, Record, Slot, Tier, TierError, Unguarded, WriteOp,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    load::Model,
    nvme_support::{digest, key, write_id},
};

/// Ops in flight.
const OPS_MAX: usize = 16;
/// Bytes that payloads are cut from.
const POOL_BYTES: usize = 8 << 20;
/// Every so many bytes say which chunk this is, and where in it.
const STAMP_EVERY: usize = 4096;

pub(crate) struct Rig {
    tier: NvmeTier,
    arena: Arc<Arena>,
    pool: Vec<u8>,
    ops: HashMap<OpId, u32>,
    writing: HashSet<u32>,
    next_op: u64,
    sizes: HashMap<u32, u64>,
    written: HashMap<u32, u64>,
    hits: HashMap<u32, u64>,
    pub(crate) verified_bytes: u64,
}

fn model_of(number: u32) -> u32 {
    number >> 24
}

impl Rig {
    /// Chunks of `payload_bytes_max` at most.
    pub(crate) fn open(config: NvmeConfig, payload_bytes_max: u64) -> Self {
        let slot_bytes = usize::try_from(kv_tiers::record_bytes(payload_bytes_max)).unwrap();
        let arena = Arena::new(ArenaConfig::new(slot_bytes, 2 * OPS_MAX)).unwrap();
        let mut pool = vec![0; POOL_BYTES];
        fastrand::Rng::with_seed(7).fill(&mut pool);
        Self::on(config, arena, pool)
    }

    fn on(config: NvmeConfig, arena: Arc<Arena>, pool: Vec<u8>) -> Self {
        Self {
            tier: NvmeTier::open(config, &[Arc::clone(&arena)], 0).unwrap(),
            arena,
            pool,
            ops: HashMap::new(),
            writing: HashSet::new(),
            next_op: 0,
            sizes: HashMap::new(),
            written: HashMap::new(),
            hits: HashMap::new(),
            verified_bytes: 0,
        }
    }

    /// Closes the store and opens it again.
    pub(crate) fn reopen(self, config: NvmeConfig) -> Self {
        let Self { tier, arena, pool, .. } = self;
        drop(tier);
        Self::on(config, arena, pool)
    }

    /// Bytes that only this chunk has, cheaply made.
    fn payload(&self, number: u32, bytes: u64) -> Vec<u8> {
        let bytes = usize::try_from(bytes).unwrap();
        let from = number as usize * 4099 % (POOL_BYTES - bytes);
        let mut payload = self.pool[from..from + bytes].to_vec();
        for (place, stamp) in (0_u64..).zip(payload.chunks_exact_mut(STAMP_EVERY)) {
            stamp[..8].copy_from_slice(&(u64::from(number) << 32 | place).to_le_bytes());
        }
        payload
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.tier.stats().chunks
    }

    /// Payload bytes written.
    pub(crate) fn written(&self, model: &Model) -> u64 {
        self.written.get(&model.id).copied().unwrap_or(0)
    }

    /// Chunks asked for that were read, byte for byte.
    pub(crate) fn hits(&self, model: &Model) -> u64 {
        self.hits.get(&model.id).copied().unwrap_or(0)
    }

    /// Payload bytes that are held of a model.
    pub(crate) fn held(&self, model: &Model) -> u64 {
        let mut bytes = 0;
        // Records of different models have different sizes.
        self.tier.list(&mut |_, held| {
            bytes += if held.payload_bytes == model.payload_bytes { held.payload_bytes } else { 0 };
        });
        bytes
    }

    fn holds(&self, number: u32) -> bool {
        self.tier.contains(digest(number)).is_some()
    }

    /// Reads the chunks of a request up to the first that is not held, and writes the rest.
    pub(crate) fn serve(&mut self, model: &Model, chunks: &[u32]) {
        self.sizes.insert(model.id, model.payload_bytes);
        while chunks.iter().any(|number| self.writing.contains(number)) {
            self.wait();
        }
        let held = chunks.iter().take_while(|&&number| self.holds(number)).count();
        for &number in &chunks[..held] {
            self.read(number);
        }
        for &number in &chunks[held..] {
            if !self.holds(number) && !self.writing.contains(&number) {
                self.write(number);
            }
        }
    }

    fn read(&mut self, number: u32) {
        let (id, slot) = self.begin(number);
        let blocks = 0..u32::MAX;
        let read = ReadOp { id, digest: digest(number), blocks, slot, purpose: Purpose::Use };
        self.tier.submit(Op::Read(read), 0).unwrap();
    }

    fn write(&mut self, number: u32) {
        let (id, slot) = self.begin(number);
        let payload = self.payload(number, self.sizes[&model_of(number)]);
        let record = Record::encode(slot, &key(number), write_id(number, 0), &payload).unwrap();
        self.writing.insert(number);
        self.tier.submit(Op::Write(WriteOp { id, record: Arc::new(record) }), 0).unwrap();
    }

    /// A number and a slot for an op, once there are not too many.
    fn begin(&mut self, number: u32) -> (OpId, Slot) {
        while self.ops.len() >= OPS_MAX {
            self.wait();
        }
        self.next_op += 1;
        self.ops.insert(OpId(self.next_op), number);
        (OpId(self.next_op), self.arena.try_take().unwrap())
    }

    /// Until nothing is in flight.
    pub(crate) fn settle(&mut self) {
        while !self.ops.is_empty() {
            self.wait();
        }
    }

    /// Takes what completed, after some has; panics if nothing does for half a minute.
    fn wait(&mut self) {
        for _ in 0..1_500 {
            let mut completions = Vec::new();
            let again = self.tier.poll(0, &Unguarded, &mut completions);
            let ended = completions.into_iter().filter_map(|it| self.take(it)).count();
            if ended > 0 {
                return;
            }
            if again.is_none() {
                let fd = self.tier.wake_fd().unwrap();
                let timeout = PollTimeout::from(20u8);
                poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], timeout).unwrap();
            }
        }
        panic!("ops stay in flight: {:?}", self.tier);
    }

    /// The op that this ended.
    fn take(&mut self, completion: Completion) -> Option<OpId> {
        match completion {
            Completion::Write { id, result, .. } => {
                let number = self.ops.remove(&id).unwrap();
                result.unwrap();
                self.writing.remove(&number);
                let model = model_of(number);
                *self.written.entry(model).or_default() += self.sizes[&model];
                Some(id)
            }
            Completion::Read { id, slot, result, .. } => {
                let number = self.ops.remove(&id).unwrap();
                match result {
                    Ok(done) => self.compare(number, slot, done),
                    // A write of the same request was given its place.
                    Err(TierError::NotFound { .. }) => {}
                    Err(error) => panic!("chunk {number:x}: {error}"),
                }
                Some(id)
            }
            Completion::Lost { error, .. } => panic!("{error}"),
            _ => None,
        }
    }

    fn compare(&mut self, number: u32, slot: Slot, done: ReadDone) {
        let piece = Piece::verify(slot, done, &key(number), &(0..u32::MAX)).unwrap();
        let model = model_of(number);
        let expected = self.payload(number, self.sizes[&model]);
        assert!(piece.bytes() == expected, "chunk {number:x} has other bytes");
        self.verified_bytes += expected.len() as u64;
        *self.hits.entry(model).or_default() += 1;
    }

    /// Reads everything that is held.
    pub(crate) fn check_all(&mut self, models: &[Model]) {
        let held = self.chunks();
        for model in models {
            self.sizes.insert(model.id, model.payload_bytes);
            for number in model.numbers() {
                if self.holds(number) {
                    self.read(number);
                }
            }
        }
        self.settle();
        assert_eq!(self.hits.values().sum::<u64>(), held);
    }
}
