//! What the tests of the shared tier share: a node, that is one tier on a directory that others have as well.

#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses some of these")]

use std::{
    collections::HashMap,
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kv_chunk::{Digest, HEADER_BYTES, block_crc};
use kv_tiers::{
    Arena, Completion, EvictionGuard, Held, Located, Op, OpId, Piece, Purpose, ReadDone, ReadOp,
    Record, Rejected, SharedConfig, SharedTier, Slot, Tier, TierError, Unguarded, WriteOp,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::nvme_support::{MIB, arena, digest, key, payload, write_id};

static NODES: AtomicU64 = AtomicU64::new(1);

/// A configuration with a node number of its own, and a lease that changes hands quickly.
pub(crate) fn config(directory: &Path) -> SharedConfig {
    let node = NODES.fetch_add(1, Ordering::Relaxed);
    let mut config = SharedConfig::new("shared", directory, 64 * MIB, node);
    config.lease_ttl = Duration::from_millis(80);
    config
}

pub(crate) struct Node {
    pub(crate) tier: SharedTier,
    pub(crate) arena: Arc<Arena>,
    pub(crate) version: u32,
    pub(crate) evicted: Vec<Digest>,
    written: HashMap<OpId, Result<(), TierError>>,
    read: HashMap<OpId, (Slot, Result<ReadDone, TierError>)>,
    begun: Instant,
    ops: u64,
}

impl Node {
    pub(crate) fn open(config: SharedConfig) -> Self {
        Self::try_open(config).unwrap()
    }

    pub(crate) fn try_open(config: SharedConfig) -> Result<Self, TierError> {
        Ok(Self {
            tier: SharedTier::open(config, 0)?,
            arena: arena(),
            version: 1,
            evicted: Vec::new(),
            written: HashMap::new(),
            read: HashMap::new(),
            begun: Instant::now(),
            ops: 0,
        })
    }

    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap()
    }

    pub(crate) fn poll(&mut self) {
        self.poll_with(&Unguarded);
    }

    pub(crate) fn poll_with(&mut self, guard: &dyn EvictionGuard) {
        let mut completions = Vec::new();
        self.tier.poll(self.now_ns(), guard, &mut completions);
        for completion in completions {
            match completion {
                Completion::Read { id, slot, result, .. } => {
                    self.read.insert(id, (slot, result));
                }
                Completion::Write { id, result, .. } => {
                    self.written.insert(id, result);
                }
                Completion::Evicted { digest } => self.evicted.push(digest),
                Completion::Lost { digest, error } => panic!("{digest} lost: {error}"),
            }
        }
    }

    pub(crate) fn sleep(&self) {
        let fd = self.tier.wake_fd().unwrap();
        let timeout = PollTimeout::from(5u8);
        poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], timeout).unwrap();
    }

    /// Polls until `done`, which panics after half a minute.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !done(self) {
            assert!(Instant::now() < end, "{what}: {:?} {:?}", self.tier, self.tier.detail());
            self.poll();
            self.sleep();
        }
    }

    fn slot(&mut self) -> Slot {
        let arena = Arc::clone(&self.arena);
        let mut slot = None;
        self.until("no free slot", |_| {
            slot = arena.try_take();
            slot.is_some()
        });
        slot.unwrap()
    }

    pub(crate) fn submit_write(&mut self, number: u32, bytes: u64) -> OpId {
        self.try_submit_write(number, bytes).unwrap()
    }

    pub(crate) fn try_submit_write(&mut self, number: u32, bytes: u64) -> Result<OpId, Rejected> {
        self.ops += 1;
        let (id, version) = (OpId(self.ops), self.version);
        let slot = self.slot();
        let payload = payload(number, version, bytes);
        let record = Record::encode(slot, &key(number), write_id(number, version), &payload);
        let op = WriteOp { id, record: Arc::new(record.unwrap()) };
        self.tier.submit(Op::Write(op), self.now_ns())?;
        Ok(id)
    }

    pub(crate) fn submit_read(&mut self, number: u32) -> OpId {
        self.ops += 1;
        let (id, slot) = (OpId(self.ops), self.slot());
        let read =
            ReadOp { id, digest: digest(number), blocks: 0..u32::MAX, slot, purpose: Purpose::Use };
        self.tier.submit(Op::Read(read), self.now_ns()).unwrap();
        id
    }

    pub(crate) fn write_result(&mut self, id: OpId) -> Option<Result<(), TierError>> {
        self.written.remove(&id)
    }

    pub(crate) fn try_write(&mut self, number: u32, bytes: u64) -> Result<(), TierError> {
        let id = self.submit_write(number, bytes);
        self.until("a write", |node| node.written.contains_key(&id));
        self.written.remove(&id).unwrap()
    }

    pub(crate) fn write(&mut self, number: u32, bytes: u64) {
        self.try_write(number, bytes).unwrap();
    }

    /// The whole chunk, header verified, or why not.
    pub(crate) fn try_read(&mut self, number: u32) -> Result<(Slot, ReadDone), TierError> {
        let id = self.submit_read(number);
        self.until("a read", |node| node.read.contains_key(&id));
        let (slot, result) = self.read.remove(&id).unwrap();
        result.map(|done| (slot, done))
    }

    pub(crate) fn read_result(&mut self, id: OpId) -> Option<Result<ReadDone, TierError>> {
        self.read.remove(&id).map(|(_, result)| result)
    }

    /// The verified payload; `None` for a miss.
    pub(crate) fn read(&mut self, number: u32) -> Option<Vec<u8>> {
        match self.try_read(number) {
            Ok((slot, done)) => {
                let piece = Piece::verify(slot, done, &key(number), &(0..u32::MAX)).unwrap();
                Some(piece.bytes().to_vec())
            }
            Err(TierError::NotFound { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn locate(&mut self, number: u32) -> Option<Held> {
        let mut found = None;
        self.until("a look-up", |node| {
            let now_ns = node.now_ns();
            match node.tier.locate(digest(number), now_ns) {
                Located::Asked => false,
                Located::Absent => true,
                Located::Held(held) => {
                    found = Some(held);
                    true
                }
            }
        });
        found
    }

    pub(crate) fn holds(&self, number: u32) -> bool {
        self.tier.contains(digest(number)).is_some()
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.tier.detail().leader
    }
}

/// Makes a chunk's file one of a later version, whole in its own way.
pub(crate) fn make_later(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[8] = 2;
    bytes[12..16].fill(0);
    let crc = block_crc(&bytes[..HEADER_BYTES]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

pub(crate) fn path_of(directory: &Path, number: u32) -> PathBuf {
    let name = digest(number).to_string();
    directory.join(&name[..3]).join(format!("{name}.kvc"))
}

/// All files below a directory whose names end in `end`.
pub(crate) fn files(directory: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, end));
        } else if path.to_str().unwrap().ends_with(end) {
            found.push(path);
        }
    }
    found
}

pub(crate) fn chunk_bytes(directory: &Path) -> u64 {
    files(directory, ".kvc")
        .iter()
        .map(|path| fs::metadata(path).map_or(0, |file| file.len()))
        .sum()
}
