//! The pool of one step: every chunk to be read, and which tier reads it next.

use crossbeam_utils::CachePadded;

use crate::lane::Lane;
use crate::open_set::OpenSet;
use crate::report::TierCounters;
use crate::slot::{Change, PIECES, Slot, Word};
use crate::sync::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use crate::tail::Hedge;
use crate::{ChunkSpec, ChunkStatus, MAX_TIERS, PoolConfig, PoolError, Tail, TierId, TierMask};

/// The reads of one scheduler step, shared by one thread per tier.
///
/// All calls take `&self`, block nowhere and allocate nothing; the pool is built with all it will
/// ever need. Each chunk is resolved exactly once: delivered, or missed with a reason. Dropping a
/// pool with claims outstanding is safe; their answers have nowhere to go.
pub struct StepPool {
    pub(crate) config: PoolConfig,
    pub(crate) chunks: Box<[Chunk]>,
    pub(crate) slots: Box<[Slot]>,
    pub(crate) lanes: Box<[Lane]>,
    /// By tier: chunks that came back or are partly claimed, and that only this tier can read.
    pub(crate) exclusive: Box<[OpenSet]>,
    /// By tier: the same for chunks that other tiers can read as well.
    pub(crate) shared: Box<[OpenSet]>,
    /// Tiers masked for the whole step. Written by `mask_tier` with `AcqRel` before it visits the
    /// chunks; read by claimants with `Acquire`, only to turn away early and to rank lanes.
    pub(crate) gone: AtomicU8,
    pub(crate) waiting: CachePadded<Waiting>,
    /// Chunks that are not resolved. Lowered by whoever resolves one, with `AcqRel`, so that who
    /// reads 0 (`Acquire`) sees everything that was delivered.
    unresolved: CachePadded<AtomicU32>,
    /// Unclaimed bytes by dense rank; empty where the step has one rank. Written by whoever claims
    /// or returns; `Relaxed`, because it only ranks lanes.
    rank_bytes: Box<[AtomicI64]>,
    pub(crate) hedge: Option<Hedge>,
    pub(crate) counters: [CachePadded<TierCounters>; MAX_TIERS as usize],
}

/// What never changes about a chunk.
pub(crate) struct Chunk {
    pub(crate) bytes: u64,
    pub(crate) blocks: u32,
    /// Dense: an index into `rank_bytes`.
    rank: u16,
    pub(crate) tiers: TierMask,
    /// Pieces it is cut into when it is cut; 1 where it is too small.
    pub(crate) pieces: u8,
}

impl Chunk {
    fn new(spec: &ChunkSpec, rank: u16) -> Self {
        let pieces = if spec.blocks < u32::from(PIECES) {
            1
        } else {
            spec.blocks.div_ceil(spec.blocks.div_ceil(u32::from(PIECES)))
        };
        let pieces = u8::try_from(pieces).unwrap_or(PIECES);
        Self { bytes: spec.bytes, blocks: spec.blocks, rank, tiers: spec.tiers, pieces }
    }

    /// First block and number of blocks of a piece.
    pub(crate) fn range(&self, piece: u8) -> (u32, u32) {
        let each = self.blocks.div_ceil(u32::from(PIECES));
        let first = (each * u32::from(piece)).min(self.blocks);
        (first, each.min(self.blocks - first))
    }

    /// Bytes of these blocks, in proportion, so that the parts of a chunk add up to it.
    pub(crate) fn bytes_of(&self, (first, blocks): (u32, u32)) -> u64 {
        let upto = |block: u32| {
            let bytes = u128::from(self.bytes) * u128::from(block) / u128::from(self.blocks);
            u64::try_from(bytes).unwrap_or(self.bytes)
        };
        upto(first + blocks) - upto(first)
    }

    fn unclaimed_bytes(&self, word: Word) -> u64 {
        let parts = word.unclaimed(self.pieces);
        if !word.is_split() {
            return if parts == 0 { 0 } else { self.bytes };
        }
        let unclaimed = (0..self.pieces).filter(|&p| parts & 1 << p != 0);
        unclaimed.map(|p| self.bytes_of(self.range(p))).sum()
    }
}

impl StepPool {
    /// A pool over `chunks`, which are numbered by their place in the slice: the prefix first.
    ///
    /// Chunks that no tier holds are misses from the start, so a pool can be finished as soon as
    /// it is built: ask [`is_finished`](Self::is_finished), since no later call will report it.
    ///
    /// # Errors
    ///
    /// A configuration or a chunk that makes no sense; see [`PoolError`].
    pub fn new(chunks: &[ChunkSpec], config: &PoolConfig) -> Result<Self, PoolError> {
        check(chunks, config)?;
        let ranks = dense_ranks(chunks);
        let metas: Box<[Chunk]> = chunks
            .iter()
            .map(|spec| {
                let rank = ranks.binary_search(&spec.rank).unwrap_or(0);
                Chunk::new(spec, u16::try_from(rank).unwrap_or(u16::MAX))
            })
            .collect();
        let sets = || (0..config.tiers).map(|_| OpenSet::new(chunks.len())).collect();
        let pool = Self {
            lanes: lanes(&metas, config.fastest),
            slots: chunks.iter().map(|spec| Slot::new(Word::new(spec.tiers))).collect(),
            exclusive: sets(),
            shared: sets(),
            gone: AtomicU8::new(0),
            waiting: CachePadded::new(Waiting::new(&metas)),
            unresolved: CachePadded::new(AtomicU32::new(held(&metas))),
            rank_bytes: rank_bytes(&metas, ranks.len()),
            hedge: (config.tail != Tail::Whole).then(|| Hedge::new(&metas, config)),
            counters: Default::default(),
            chunks: metas,
            config: config.clone(),
        };
        Ok(pool)
    }

    /// Whether every chunk is resolved. Once true it stays true, and whoever sees it sees all that
    /// was delivered.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.unresolved.load(Ordering::Acquire) == 0
    }

    /// Number of chunks that are not resolved.
    #[must_use]
    pub fn unresolved(&self) -> u32 {
        self.unresolved.load(Ordering::Acquire)
    }

    /// Number of chunks in the step.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Whether the step has no chunk.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Number of reads that wait to be claimed: untouched or returned chunks, and single pieces.
    /// A snapshot: exact when no other thread is in a call.
    #[must_use]
    pub fn unclaimed(&self) -> u32 {
        let (chunks, pieces) = self.waiting.get();
        chunks + pieces
    }

    /// Where the chunk stands; `None` if the step has no such chunk.
    #[must_use]
    pub fn status(&self, chunk: u32) -> Option<ChunkStatus> {
        let (slot, meta) = self.at(chunk)?;
        Some(slot.load().status(meta.pieces))
    }

    /// The tiers that may still be asked for the chunk: its replicas without those that failed.
    #[must_use]
    pub fn remaining_tiers(&self, chunk: u32) -> Option<TierMask> {
        Some(self.at(chunk)?.0.load().alive())
    }

    /// The configuration it was built with.
    #[must_use]
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    pub(crate) fn at(&self, chunk: u32) -> Option<(&Slot, &Chunk)> {
        let i = usize::try_from(chunk).ok()?;
        Some((self.slots.get(i)?, self.chunks.get(i)?))
    }

    pub(crate) fn gone(&self) -> TierMask {
        TierMask::from_bits(self.gone.load(Ordering::Acquire))
    }

    pub(crate) fn rank_bytes(&self, rank: usize) -> i64 {
        self.rank_bytes.get(rank).map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// Brings the pool's counts up to date with a transition of one chunk. Returns whether it
    /// resolved the last one. Every transition comes through here exactly once.
    pub(crate) fn account<T>(&self, chunk: &Chunk, change: &Change<T>) -> bool {
        self.waiting.change(chunk, change.old, change.new);
        if let Some(left) = self.rank_bytes.get(usize::from(chunk.rank)) {
            let (old, new) = (chunk.unclaimed_bytes(change.old), chunk.unclaimed_bytes(change.new));
            if old != new {
                left.fetch_add(new.wrapping_sub(old).cast_signed(), Ordering::Relaxed);
            }
        }
        change.old.is_open()
            && !change.new.is_open()
            && self.unresolved.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

impl AsRef<Self> for StepPool {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl core::fmt::Debug for StepPool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("StepPool")
            .field("chunks", &self.len())
            .field("unclaimed", &self.unclaimed())
            .field("unresolved", &self.unresolved())
            .finish_non_exhaustive()
    }
}

/// How many chunks (low half) and pieces of split chunks (high half) are unclaimed, as two signed
/// 32-bit numbers added up in one word.
///
/// Written after the transition that it counts, so that it can be behind and even negative for a
/// moment. Decides only when to split and to duplicate, and when there is surely nothing to claim:
/// a claimant that it turns away wrongly meets a transition that is still in its call.
pub(crate) struct Waiting(AtomicU64);

impl Waiting {
    fn new(chunks: &[Chunk]) -> Self {
        Self(AtomicU64::new(u64::from(held(chunks))))
    }

    pub(crate) fn get(&self) -> (u32, u32) {
        let both = self.0.load(Ordering::Acquire).cast_signed();
        let [a, b, c, d, ..] = both.to_le_bytes();
        let chunks = i64::from(i32::from_le_bytes([a, b, c, d]));
        let pieces = (both - chunks) >> 32;
        let clamp = |n: i64| u32::try_from(n).unwrap_or(0);
        (clamp(chunks), clamp(pieces))
    }

    fn change(&self, chunk: &Chunk, old: Word, new: Word) {
        let count = |word: Word| {
            let parts = i64::from(word.unclaimed(chunk.pieces).count_ones());
            if word.is_split() { parts << 32 } else { parts }
        };
        let delta = count(new) - count(old);
        if delta != 0 {
            self.0.fetch_add(delta.cast_unsigned(), Ordering::AcqRel);
        }
    }
}

fn check(chunks: &[ChunkSpec], config: &PoolConfig) -> Result<(), PoolError> {
    let tiers = config.tiers;
    if tiers > MAX_TIERS {
        return Err(PoolError::TooManyTiers { tiers });
    }
    if tiers > 0 && config.fastest.0 >= tiers {
        return Err(PoolError::UnknownFastest { fastest: config.fastest, tiers });
    }
    if i32::try_from(chunks.len()).is_err() {
        return Err(PoolError::TooManyChunks { chunks: chunks.len() });
    }
    for (chunk, spec) in chunks.iter().enumerate() {
        if let Some(tier) = spec.tiers.minus(TierMask::all(tiers)).first() {
            return Err(PoolError::UnknownTier { chunk, tier, tiers });
        }
        if spec.blocks == 0 {
            return Err(PoolError::NoBlocks { chunk });
        }
    }
    Ok(())
}

fn dense_ranks(chunks: &[ChunkSpec]) -> Vec<u16> {
    let mut ranks: Vec<u16> = chunks.iter().map(|spec| spec.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

fn rank_bytes(chunks: &[Chunk], ranks: usize) -> Box<[AtomicI64]> {
    if ranks < 2 {
        return Box::default();
    }
    let mut bytes = vec![0_u64; ranks];
    for chunk in chunks.iter().filter(|chunk| !chunk.tiers.is_empty()) {
        bytes[usize::from(chunk.rank)] += chunk.bytes;
    }
    bytes.into_iter().map(|bytes| AtomicI64::new(bytes.cast_signed())).collect()
}

fn lanes(chunks: &[Chunk], fastest: TierId) -> Box<[Lane]> {
    let key = |i: &u32| chunks.get(*i as usize).map(|chunk| (chunk.rank, chunk.tiers));
    let count = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
    let mut order: Vec<u32> = (0..count).collect();
    order.sort_by_key(key);
    order
        .chunk_by(|a, b| key(a) == key(b))
        .filter_map(|run| {
            let chunk = chunks.get(*run.first()? as usize)?;
            let lane = Lane::new(chunk.tiers, usize::from(chunk.rank), fastest, run.into());
            (!chunk.tiers.is_empty()).then_some(lane)
        })
        .collect()
}

/// Chunks that some tier holds.
fn held(chunks: &[Chunk]) -> u32 {
    let held = chunks.iter().filter(|chunk| !chunk.tiers.is_empty()).count();
    u32::try_from(held).unwrap_or(u32::MAX)
}
