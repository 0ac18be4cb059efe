//! The pool's rules once more: sequential, slow and plain. Every answer of the pool is compared.

use super::{Event, Read};
use crate::{
    ChunkSpec, ChunkStatus, Delivery, Failure, MissReason, Outcome, PoolConfig, Split, StepPool,
    Tail, TierId, TierMask, Withdrawn,
};

struct Part {
    first: u32,
    blocks: u32,
    done: bool,
    issued: usize,
    /// The live readers, each with its number among the part's readers.
    live: Vec<(usize, Read)>,
    /// When it was first claimed, putting back not counted.
    claimed: Option<usize>,
}

impl Part {
    fn new(first: u32, blocks: u32) -> Self {
        Self { first, blocks, done: false, issued: 0, live: Vec::new(), claimed: None }
    }

    fn unclaimed(&self) -> bool {
        !self.done && self.live.is_empty()
    }
}

struct Chunk {
    spec: ChunkSpec,
    alive: TierMask,
    parts: Vec<Part>,
    split: bool,
    whole_only: bool,
    attempt: u8,
    /// Claimed at least once.
    touched: bool,
    end: Option<ChunkStatus>,
}

impl Chunk {
    fn new(spec: ChunkSpec) -> Self {
        let none = ChunkStatus::Missed(MissReason::NoReplica);
        Self {
            spec,
            alive: spec.tiers,
            parts: vec![Part::new(0, spec.blocks)],
            split: false,
            whole_only: false,
            attempt: 0,
            touched: false,
            end: spec.tiers.is_empty().then_some(none),
        }
    }

    fn unclaimed_parts(&self) -> usize {
        if self.end.is_some() { 0 } else { self.parts.iter().filter(|p| p.unclaimed()).count() }
    }

    fn claimable(&self, tier: TierId) -> bool {
        self.unclaimed_parts() > 0 && self.alive.contains(tier)
    }

    fn unclaimed_bytes(&self) -> u64 {
        let parts = self.parts.iter().filter(|part| self.end.is_none() && part.unclaimed());
        parts.map(|part| u64::from(part.blocks) * 1000).sum()
    }

    fn starve(&mut self, reason: MissReason) {
        if self.alive.is_empty() && self.unclaimed_parts() > 0 {
            self.end = Some(ChunkStatus::Missed(reason));
        }
    }

    fn status(&self) -> ChunkStatus {
        match self.end {
            Some(end) => end,
            None if self.unclaimed_parts() > 0 => ChunkStatus::Waiting,
            None => ChunkStatus::Reading,
        }
    }
}

pub(crate) struct Oracle {
    config: PoolConfig,
    chunks: Vec<Chunk>,
    gone: TierMask,
    clock: usize,
    budget: u64,
    /// A duplicate was put back: its read may have been passed over for good.
    passed_over: bool,
}

impl Oracle {
    pub(crate) fn new(specs: &[ChunkSpec], config: &PoolConfig) -> Self {
        let bytes: u64 = specs.iter().map(|spec| spec.bytes).sum();
        let share = bytes * u64::from(config.duplicate_percent) / 100;
        let floor = bytes * u64::from(config.duplicate_chunks) / specs.len().max(1) as u64;
        Self {
            config: config.clone(),
            chunks: specs.iter().copied().map(Chunk::new).collect(),
            gone: TierMask::EMPTY,
            clock: 0,
            budget: share.max(floor),
            passed_over: false,
        }
    }

    pub(crate) fn check(&mut self, pool: &StepPool, event: Event) {
        match event {
            Event::Claimed(tier, split, read) => self.claimed(tier, split, read),
            Event::Duplicated(tier, read) => self.duplicated(tier, read),
            Event::Completed(read, delivery) => assert_eq!(delivery, self.completed(read)),
            Event::Failed(read, failure, outcome) => {
                assert_eq!(outcome, self.failed(read, failure), "{read:?}");
            }
            Event::Expired(read, outcome) => {
                assert_eq!(outcome, self.failed(read, Failure::TimedOut), "{read:?}");
            }
            Event::PutBack(read, outcome) => assert_eq!(outcome, self.put_back(read), "{read:?}"),
            Event::Reread(read, outcome) => assert_eq!(outcome, self.reread(read), "{read:?}"),
            Event::Dropped => {}
            Event::Masked(tier, withdrawn) => {
                self.gone = self.gone.with(tier);
                let expected = self.withdraw(|chunk| {
                    chunk.alive = chunk.alive.without(tier);
                    chunk.starve(MissReason::TierMasked);
                });
                assert_eq!(withdrawn, expected);
            }
            Event::Cancelled(withdrawn) => {
                let missed = ChunkStatus::Missed(MissReason::Cancelled);
                assert_eq!(withdrawn, self.withdraw(|chunk| chunk.end = Some(missed)));
            }
        }
        self.compare(pool);
    }

    fn compare(&self, pool: &StepPool) {
        for (i, chunk) in (0..).zip(&self.chunks) {
            assert_eq!(pool.status(i), Some(chunk.status()), "chunk {i}");
            if chunk.end.is_none() {
                assert_eq!(pool.remaining_tiers(i), Some(chunk.alive), "chunk {i}");
            }
        }
        let open = self.chunks.iter().filter(|chunk| chunk.end.is_none()).count();
        assert_eq!(pool.unresolved() as usize, open);
        assert_eq!(pool.is_finished(), open == 0);
        assert_eq!(pool.unclaimed() as usize, self.unclaimed());
    }

    fn unclaimed(&self) -> usize {
        self.chunks.iter().map(Chunk::unclaimed_parts).sum()
    }

    fn claimed(&mut self, tier: TierId, split: Split, read: Option<Read>) {
        let mut claimable = self.chunks.iter().filter(|chunk| chunk.claimable(tier));
        let Some(read) = read else {
            assert!(claimable.next().is_none(), "{tier} got nothing where something is unclaimed");
            return;
        };
        drop(claimable);
        assert!(self.chunks[read.chunk].claimable(tier), "{read:?}");
        assert_eq!((read.tier, read.duplicate), (tier, false));
        self.check_order(tier, read.chunk);
        self.cut(split, read);
        self.clock += 1;
        let (clock, chunk) = (self.clock, &mut self.chunks[read.chunk]);
        assert_eq!(read.attempt, chunk.attempt);
        chunk.touched = true;
        let part = chunk.parts.iter_mut().find(|part| part.unclaimed()).expect("claimable");
        assert_eq!((read.first_block, read.blocks), (part.first, part.blocks));
        assert_eq!(read.bytes, u64::from(part.blocks) * 1000);
        part.issued = 1;
        part.claimed.get_or_insert(clock);
        part.live.push((0, read));
    }

    /// Fewest holders, then most bytes left in the rank, then from the tier's end.
    fn check_order(&self, tier: TierId, index: usize) {
        let taken = &self.chunks[index];
        let holders = |chunk: &Chunk| chunk.spec.tiers.minus(self.gone).len();
        let rank_bytes = |chunk: &Chunk| -> u64 {
            let rank = self.chunks.iter().filter(|other| other.spec.rank == chunk.spec.rank);
            rank.map(Chunk::unclaimed_bytes).sum()
        };
        let mut untouched =
            self.chunks.iter().filter(|chunk| chunk.claimable(tier) && !chunk.touched);
        if taken.touched {
            let exclusive = untouched.any(|chunk| holders(chunk) == 1);
            assert!(!exclusive || taken.alive.len() == 1, "chunk {index} came before an exclusive");
            return;
        }
        for other in untouched {
            let key = |chunk| (holders(chunk), core::cmp::Reverse(rank_bytes(chunk)));
            assert!(key(taken) <= key(other), "chunk {index} was not next");
        }
        let came_back = self.chunks.iter().any(|chunk| chunk.claimable(tier) && chunk.touched);
        assert!(holders(taken) == 1 || !came_back, "chunk {index} came before one that came back");
        let mut lane = (0..self.chunks.len()).filter(|&i| {
            let chunk = &self.chunks[i];
            let same = (chunk.spec.tiers, chunk.spec.rank) == (taken.spec.tiers, taken.spec.rank);
            same && !chunk.touched && chunk.end.is_none()
        });
        let fastest = self.config.fastest;
        let head = if taken.spec.tiers.contains(fastest) {
            Some(fastest)
        } else {
            taken.spec.tiers.first()
        };
        let next = if head == Some(tier) { lane.next() } else { lane.next_back() };
        assert_eq!(next, Some(index), "{tier} left its run");
    }

    fn cut(&mut self, split: Split, read: Read) {
        let waiting = |chunk: &&Chunk| !chunk.split && chunk.unclaimed_parts() > 0;
        let waiting = self.chunks.iter().filter(waiting).count();
        let windows: u16 = self.config.windows[..usize::from(self.config.tiers)].iter().sum();
        let tail = waiting <= 2 * usize::from(windows);
        let wanted = split == Split::InTail && self.config.tail == Tail::SplitAndDuplicate && tail;
        let chunk = &mut self.chunks[read.chunk];
        let blocks = chunk.spec.blocks;
        if wanted && !chunk.split && !chunk.whole_only && blocks >= 4 {
            let each = blocks.div_ceil(4);
            let firsts = (0..blocks).step_by(each as usize);
            chunk.parts = firsts.map(|at| Part::new(at, each.min(blocks - at))).collect();
            chunk.split = true;
        }
        assert_eq!(read.piece, chunk.split, "{read:?}");
    }

    fn duplicated(&mut self, tier: TierId, read: Option<Read>) {
        let oldest = self.oldest_outstanding(tier);
        let Some(read) = read else {
            let affordable = oldest.is_some_and(|(i, p)| {
                u64::from(self.chunks[i].parts[p].blocks) * 1000 <= self.budget
            });
            assert!(!affordable || self.passed_over, "{tier} could have duplicated {oldest:?}");
            return;
        };
        assert!(read.duplicate && read.tier == tier);
        assert_eq!(self.unclaimed(), 0, "a duplicate came before an unclaimed read");
        let (i, p) = oldest.expect("something to duplicate");
        let part = if self.passed_over { self.part_of(read) } else { p };
        assert!(self.passed_over || i == read.chunk, "chunk {i} is outstanding longer");
        self.budget = self.budget.checked_sub(read.bytes).expect("within the budget");
        let chunk = &mut self.chunks[read.chunk];
        assert!(chunk.alive.contains(tier));
        let part = &mut chunk.parts[part];
        assert_eq!((read.first_block, read.blocks), (part.first, part.blocks));
        assert!(!part.live.is_empty() && part.issued < 3, "{read:?}");
        part.live.push((part.issued, read));
        part.issued += 1;
    }

    fn oldest_outstanding(&self, tier: TierId) -> Option<(usize, usize)> {
        if self.config.tail == Tail::Whole || self.unclaimed() != 0 || self.gone.contains(tier) {
            return None;
        }
        let open = self.chunks.iter().enumerate();
        let open = open.filter(|(_, chunk)| chunk.end.is_none() && chunk.alive.contains(tier));
        let parts = open.flat_map(|(i, chunk)| {
            chunk.parts.iter().enumerate().map(move |(p, part)| (part.claimed, i, p, part))
        });
        parts
            .filter(|(.., part)| !part.live.is_empty() && part.issued < 3)
            .min_by_key(|(claimed, ..)| *claimed)
            .map(|(_, i, p, _)| (i, p))
    }

    fn part_of(&self, read: Read) -> usize {
        let parts = &self.chunks[read.chunk].parts;
        parts.iter().position(|part| part.first == read.first_block).expect("a part of the chunk")
    }

    /// The part that the read is live in, and its number there.
    fn live(&self, read: Read) -> Option<(usize, usize)> {
        let chunk = &self.chunks[read.chunk];
        let mut parts = chunk.parts.iter().enumerate().filter(|_| chunk.end.is_none());
        parts.find_map(|(p, part)| {
            part.live.iter().find(|(_, live)| *live == read).map(|(n, _)| (p, *n))
        })
    }

    fn completed(&mut self, read: Read) -> Delivery {
        let Some((p, _)) = self.live(read) else { return Delivery::Late };
        let chunk = &mut self.chunks[read.chunk];
        chunk.parts[p].done = true;
        chunk.parts[p].live.clear();
        let chunk_done = chunk.parts.iter().all(|part| part.done);
        if chunk_done {
            chunk.end = Some(ChunkStatus::Delivered);
        }
        Delivery::First { chunk_done, step_done: chunk_done && self.all_resolved() }
    }

    fn failed(&mut self, read: Read, failure: Failure) -> Outcome {
        let Some((p, number)) = self.live(read) else { return Outcome::Ignored };
        let chunk = &mut self.chunks[read.chunk];
        chunk.alive = chunk.alive.without(read.tier);
        self.lose(read.chunk, p, number, MissReason::Failed(failure))
    }

    fn put_back(&mut self, read: Read) -> Outcome {
        if read.duplicate {
            self.budget += read.bytes;
            self.passed_over = true;
        }
        let Some((p, number)) = self.live(read) else { return Outcome::Ignored };
        let part = &mut self.chunks[read.chunk].parts[p];
        part.issued -= usize::from(number + 1 == part.issued);
        self.lose(read.chunk, p, number, MissReason::TierMasked)
    }

    fn lose(&mut self, chunk: usize, p: usize, number: usize, reason: MissReason) -> Outcome {
        let part = &mut self.chunks[chunk].parts[p];
        part.live.retain(|(n, _)| *n != number);
        let covered = !part.live.is_empty();
        if !covered && part.issued > 0 {
            (part.issued, part.claimed) = (0, None);
        }
        self.chunks[chunk].starve(reason);
        if self.chunks[chunk].end.is_some() {
            Outcome::Missed { step_done: self.all_resolved() }
        } else if covered {
            Outcome::Covered
        } else {
            Outcome::Returned
        }
    }

    fn reread(&mut self, read: Read) -> Outcome {
        if !read.piece {
            return self.failed(read, Failure::Corrupt);
        }
        if self.live(read).is_none() {
            return Outcome::Ignored;
        }
        let chunk = &mut self.chunks[read.chunk];
        chunk.parts = vec![Part::new(0, chunk.spec.blocks)];
        (chunk.split, chunk.whole_only) = (false, true);
        chunk.attempt += 1;
        chunk.starve(MissReason::Failed(Failure::Corrupt));
        if chunk.end.is_some() {
            Outcome::Missed { step_done: self.all_resolved() }
        } else {
            Outcome::Returned
        }
    }

    fn withdraw(&mut self, mut change: impl FnMut(&mut Chunk)) -> Withdrawn {
        let mut missed = 0;
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.end.is_none()) {
            change(chunk);
            missed += u32::from(chunk.end.is_some());
        }
        Withdrawn { missed, step_done: missed > 0 && self.all_resolved() }
    }

    fn all_resolved(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.end.is_some())
    }
}
