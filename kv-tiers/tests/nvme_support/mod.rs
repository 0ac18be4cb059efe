//! What the tests of the NVMe tier share: an arena, chunks, a driver of one tier, `du`.

#![allow(dead_code, reason = "each test uses a part")]

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use kv_chunk::{ChunkKey, Digest, KeySpace, Namespace, WriteId};
use kv_tiers::{
    Arena, ArenaConfig, Completion, EvictionGuard, NvmeConfig, NvmeTier, Op, OpId, Piece, Purpose,
    ReadDone, ReadOp, Record, Slot, Tier, TierError, Unguarded, WriteOp,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tempfile::TempDir;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn key(number: u32) -> ChunkKey {
    let space = KeySpace::new(&Namespace {
        model: "model".into(),
        weights: "0".into(),
        dtype: "bf16".into(),
        layout: "NHD".into(),
        chunk_tokens: 256,
        serde: "raw".into(),
        hash_algorithm: "blake3".into(),
        hash_seed: "0".into(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "test".into(),
        engine_major: 0,
        extra: BTreeMap::new(),
    });
    space.unwrap().key(0, 0, &number.to_le_bytes().repeat(8), b"").unwrap()
}

pub(crate) fn digest(number: u32) -> Digest {
    key(number).digest()
}

/// Bytes that only this chunk in this version has.
pub(crate) fn payload(number: u32, version: u32, bytes: u64) -> Vec<u8> {
    let seed = u64::from(number) << 32 | u64::from(version);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut payload = vec![0; usize::try_from(bytes).unwrap()];
    random.fill(&mut payload);
    payload
}

pub(crate) fn write_id(number: u32, version: u32) -> WriteId {
    WriteId::new(u128::from(number) << 32 | u128::from(version))
}

/// A directory on the disk below the target directory (`/tmp` can be a tmpfs).
pub(crate) fn on_disk() -> TempDir {
    option_env!("CARGO_TARGET_TMPDIR").map_or_else(tempfile::tempdir, tempfile::tempdir_in).unwrap()
}

/// A directory on tmpfs.
pub(crate) fn on_tmpfs() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Bytes of everything in and below a directory, as `du -s` counts.
pub(crate) fn du(path: &Path) -> u64 {
    let own = std::fs::symlink_metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
    let below = std::fs::read_dir(path)
        .map_or(0, |entries| entries.map(|entry| du(&entry.unwrap().path())).sum());
    own + below
}

pub(crate) fn segments(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut segments: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "kvb")).collect();
    segments.sort();
    segments
}

/// The files of the index: snapshots and journals.
pub(crate) fn index_files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_index = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("index-"))
    };
    let mut files: Vec<_> = entries.filter(is_index).collect();
    files.sort();
    files
}

/// The next open must read all headers.
pub(crate) fn remove_index_files(directory: &Path) {
    index_files(directory).iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

/// What a kill at this moment would leave, the kernel being done with all requests.
pub(crate) fn copy_as_killed(directory: &Path) -> TempDir {
    let copy = on_disk();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// One tier and what it completed.
pub(crate) struct Driver {
    pub(crate) tier: NvmeTier,
    pub(crate) arena: Arc<Arena>,
    pub(crate) written: Vec<(OpId, Digest, Result<(), TierError>)>,
    pub(crate) read: HashMap<OpId, (Slot, Result<ReadDone, TierError>)>,
    pub(crate) evicted: Vec<Digest>,
    pub(crate) lost: Vec<(Digest, TierError)>,
    ops: u64,
    version: u32,
}

pub(crate) fn arena() -> Arc<Arena> {
    Arena::new(ArenaConfig::new(5 << 20, 16)).unwrap()
}

impl Driver {
    pub(crate) fn open(config: NvmeConfig) -> Self {
        Self::try_open(config).unwrap()
    }

    pub(crate) fn try_open(config: NvmeConfig) -> Result<Self, TierError> {
        let arena = arena();
        let tier = NvmeTier::open(config, &[Arc::clone(&arena)], 0)?;
        Ok(Self {
            tier,
            arena,
            written: Vec::new(),
            read: HashMap::new(),
            evicted: Vec::new(),
            lost: Vec::new(),
            ops: 0,
            version: 1,
        })
    }

    fn id(&mut self) -> OpId {
        self.ops += 1;
        OpId(self.ops)
    }

    pub(crate) fn record(&mut self, number: u32, version: u32, bytes: u64) -> Arc<Record> {
        let slot = self.slot();
        let payload = payload(number, version, bytes);
        let record = Record::encode(slot, &key(number), write_id(number, version), &payload);
        Arc::new(record.unwrap())
    }

    fn slot(&mut self) -> Slot {
        for _ in 0..10_000 {
            if let Some(slot) = self.arena.try_take() {
                return slot;
            }
            self.poll(&Unguarded);
            self.sleep();
        }
        panic!("no free slot");
    }

    pub(crate) fn submit_write(&mut self, number: u32, bytes: u64) -> OpId {
        let id = self.id();
        let record = self.record(number, self.version, bytes);
        self.tier.submit(Op::Write(WriteOp { id, record }), 0).unwrap();
        id
    }

    pub(crate) fn submit_read(&mut self, number: u32, blocks: Range<u32>) -> OpId {
        let id = self.id();
        let slot = self.slot();
        let read = ReadOp { id, digest: digest(number), blocks, slot, purpose: Purpose::Use };
        self.tier.submit(Op::Read(read), 0).unwrap();
        id
    }

    pub(crate) fn poll(&mut self, guard: &dyn EvictionGuard) -> usize {
        let mut completions = Vec::new();
        self.tier.poll(0, guard, &mut completions);
        let count = completions.len();
        for completion in completions {
            match completion {
                Completion::Read { id, slot, result, .. } => {
                    self.read.insert(id, (slot, result));
                }
                Completion::Write { id, digest, result } => self.written.push((id, digest, result)),
                Completion::Evicted { digest } => self.evicted.push(digest),
                Completion::Lost { digest, error } => self.lost.push((digest, error)),
            }
        }
        count
    }

    fn sleep(&self) {
        let fd = self.tier.wake_fd().unwrap();
        let timeout = PollTimeout::from(20u8);
        poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], timeout).unwrap();
    }

    /// Polls until nothing is in flight; panics after half a minute.
    pub(crate) fn settle_with(&mut self, guard: &dyn EvictionGuard) {
        for _ in 0..1_500 {
            self.poll(guard);
            if self.tier.in_flight() == 0 {
                // Wipes are not ops: give them time to start and end.
                for _ in 0..3 {
                    self.sleep();
                    self.poll(guard);
                }
                return;
            }
            self.sleep();
        }
        panic!("ops stay in flight: {:?}", self.tier);
    }

    /// Polls until no op is in flight; wipes may be.
    pub(crate) fn settle_quickly(&mut self, guard: &dyn EvictionGuard) {
        for _ in 0..1_500 {
            self.poll(guard);
            if self.tier.in_flight() == 0 {
                return;
            }
            self.sleep();
        }
        panic!("ops stay in flight: {:?}", self.tier);
    }

    pub(crate) fn settle(&mut self) {
        self.settle_with(&Unguarded);
    }

    /// Writes and waits; the result of the write.
    pub(crate) fn try_write(&mut self, number: u32, bytes: u64) -> Result<(), TierError> {
        let id = self.submit_write(number, bytes);
        for _ in 0..1_500 {
            self.poll(&Unguarded);
            if let Some(at) = self.written.iter().position(|(written, ..)| *written == id) {
                return self.written.remove(at).2;
            }
            self.sleep();
        }
        panic!("the write of {number} does not end");
    }

    pub(crate) fn write(&mut self, number: u32, bytes: u64) {
        self.try_write(number, bytes).unwrap();
        assert!(self.holds(number), "chunk {number} is written and not held");
    }

    /// Reads and waits; checks every byte.
    pub(crate) fn try_read(
        &mut self,
        number: u32,
        blocks: Range<u32>,
    ) -> Result<Vec<u8>, TierError> {
        let (slot, result) = self.read_unverified(number, blocks.clone());
        let piece = Piece::verify(slot, result?, &key(number), &blocks).unwrap();
        Ok(piece.bytes().to_vec())
    }

    /// Reads and waits.
    pub(crate) fn read_unverified(
        &mut self,
        number: u32,
        blocks: Range<u32>,
    ) -> (Slot, Result<ReadDone, TierError>) {
        let id = self.submit_read(number, blocks);
        for _ in 0..1_500 {
            self.poll(&Unguarded);
            if let Some(read) = self.read.remove(&id) {
                return read;
            }
            self.sleep();
        }
        panic!("the read of {number} does not end");
    }

    pub(crate) fn check(&mut self, number: u32, bytes: u64) {
        let read = self.try_read(number, 0..u32::MAX).unwrap();
        assert!(read == payload(number, self.version, bytes), "chunk {number} has other bytes");
    }

    pub(crate) fn holds(&self, number: u32) -> bool {
        self.tier.contains(digest(number)).is_some()
    }

    pub(crate) fn held(&self, numbers: Range<u32>) -> Vec<u32> {
        numbers.filter(|&number| self.holds(number)).collect()
    }
}
