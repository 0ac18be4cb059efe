//! The pool of one step: every chunk to be read, and which tier reads it next.

use crossbeam_utils::CachePadded;

use crate::lane::Lane;
use crate::open_set::OpenSet;
use crate::report::TierCounters;
use crate::slot::{Change, PARTS, Slot, Word};
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
    /// Parts that it can be read in; 1 where it is too small.
    pub(crate) parts: u8,
    /// Reads that the tiers which hold it keep in flight, all together.
    pub(crate) places: u32,
}

impl Chunk {
    fn new(spec: &ChunkSpec, rank: u16, config: &PoolConfig) -> Self {
        let parts = match spec.blocks {
            _ if config.tail != Tail::SplitAndDuplicate => 1,
            PARTS_BLOCKS.. => PARTS,
            HALF_PARTS_BLOCKS.. => PARTS / 2,
            _ => 1,
        };
        let places = spec.tiers.iter().filter_map(|tier| config.windows.get(tier.index()));
        let places = places.map(|&window| u32::from(window)).sum();
        Self { bytes: spec.bytes, blocks: spec.blocks, rank, tiers: spec.tiers, parts, places }
    }

    /// First block and number of blocks of a run of parts.
    pub(crate) fn range(&self, first: u8, count: u8) -> (u32, u32) {
        let begin = |part: u8| {
            let block = u64::from(self.blocks) * u64::from(part) / u64::from(self.parts);
            u32::try_from(block).unwrap_or(self.blocks)
        };
        (begin(first), begin(first + count) - begin(first))
    }

    /// Bytes of these blocks, in proportion, so that the parts of a chunk add up to it.
    pub(crate) fn bytes_of(&self, (first, blocks): (u32, u32)) -> u64 {
        if blocks == self.blocks {
            return self.bytes;
        }
        let upto = |block: u32| match self.bytes.checked_mul(block.into()) {
            Some(product) => product / u64::from(self.blocks),
            None => {
                let bytes = u128::from(self.bytes) * u128::from(block) / u128::from(self.blocks);
                u64::try_from(bytes).unwrap_or(self.bytes)
            }
        };
        upto(first + blocks) - upto(first)
    }

    /// Blocks and bytes of a set of parts.
    pub(crate) fn size_of(&self, mut parts: u8) -> (u32, u64) {
        let (mut blocks, mut bytes) = (0, 0);
        while parts != 0 {
            let first = parts.trailing_zeros();
            let count = (parts >> first).trailing_ones();
            let range = self.range(first.to_le_bytes()[0], count.to_le_bytes()[0]);
            blocks += range.1;
            bytes += self.bytes_of(range);
            parts &= !u8::MAX.checked_shr(8 - count).unwrap_or(0).checked_shl(first).unwrap_or(0);
        }
        (blocks, bytes)
    }
}

/// Blocks from which a chunk has eight parts.
const PARTS_BLOCKS: u32 = PARTS as u32;
/// Blocks from which it has four.
const HALF_PARTS_BLOCKS: u32 = PARTS_BLOCKS / 2;

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
                Chunk::new(spec, u16::try_from(rank).unwrap_or(u16::MAX), config)
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

    /// Number of chunks of which something waits to be claimed. A snapshot: exact when no other
    /// thread is in a call.
    #[must_use]
    pub fn unclaimed(&self) -> u32 {
        self.waiting.get().0
    }

    /// Where the chunk stands; `None` if the step has no such chunk.
    #[must_use]
    pub fn status(&self, chunk: u32) -> Option<ChunkStatus> {
        let (slot, meta) = self.at(chunk)?;
        Some(slot.load().status(meta.parts))
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
        let (old, new) = (change.old.unclaimed(chunk.parts), change.new.unclaimed(chunk.parts));
        if old != new {
            let (fewer, more) = (chunk.size_of(old & !new), chunk.size_of(new & !old));
            let chunks = i64::from(new != 0) - i64::from(old != 0);
            self.waiting.change(chunks, i64::from(more.0) - i64::from(fewer.0));
            if let Some(left) = self.rank_bytes.get(usize::from(chunk.rank)) {
                left.fetch_add(more.1.wrapping_sub(fewer.1).cast_signed(), Ordering::Relaxed);
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

/// Of how many chunks something is unclaimed (low half), and how many blocks of them (high half),
/// as two signed 32-bit numbers added up in one word.
///
/// Written after the transition that it counts, so that it can be behind and even negative for a
/// moment. Decides only how large a piece is, when to duplicate, and when there is surely nothing
/// to claim: a claimant that it turns away wrongly meets a transition that is still in its call.
pub(crate) struct Waiting(AtomicU64);

impl Waiting {
    fn new(chunks: &[Chunk]) -> Self {
        let blocks = chunks.iter().filter(|chunk| !chunk.tiers.is_empty());
        let blocks: u64 = blocks.map(|chunk| u64::from(chunk.blocks)).sum();
        Self(AtomicU64::new(u64::from(held(chunks)) + (blocks << 32)))
    }

    pub(crate) fn get(&self) -> (u32, u32) {
        let both = self.0.load(Ordering::Acquire).cast_signed();
        let [a, b, c, d, ..] = both.to_le_bytes();
        let chunks = i64::from(i32::from_le_bytes([a, b, c, d]));
        let blocks = (both - chunks) >> 32;
        let clamp = |n: i64| u32::try_from(n).unwrap_or(0);
        (clamp(chunks), clamp(blocks))
    }

    fn change(&self, chunks: i64, blocks: i64) {
        self.0.fetch_add((chunks + (blocks << 32)).cast_unsigned(), Ordering::AcqRel);
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
    let blocks = chunks.iter().map(|spec| u64::from(spec.blocks)).sum();
    if i32::try_from(blocks).is_err() {
        return Err(PoolError::TooManyBlocks { blocks });
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
        let sum = &mut bytes[usize::from(chunk.rank)];
        *sum = sum.saturating_add(chunk.bytes);
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
