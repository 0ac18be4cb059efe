//! The pool's rules once more: sequential, slow and plain. Every answer of the pool is compared.

use super::{Event, Read};
use crate::tail::log_entries;
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
    /// When its latest read was claimed; for the first one, putting back not counted.
    claimed: Option<usize>,
    returned: u32,
}

impl Part {
    fn unclaimed(&self) -> bool {
        !self.done && self.live.is_empty()
    }
}

struct Chunk {
    spec: ChunkSpec,
    alive: TierMask,
    parts: Vec<Part>,
    whole_only: bool,
    attempt: u8,
    /// Claimed at least once.
    touched: bool,
    end: Option<ChunkStatus>,
}

impl Chunk {
    fn new(spec: ChunkSpec, tail: Tail) -> Self {
        let none = ChunkStatus::Missed(MissReason::NoReplica);
        let parts = match spec.blocks {
            _ if tail != Tail::SplitAndDuplicate => 1,
            8.. => 8,
            4.. => 4,
            _ => 1,
        };
        let mut chunk = Self {
            spec,
            alive: spec.tiers,
            parts: Vec::new(),
            whole_only: false,
            attempt: 0,
            touched: false,
            end: spec.tiers.is_empty().then_some(none),
        };
        chunk.cut_into(parts);
        chunk
    }

    fn cut_into(&mut self, parts: u32) {
        let begin = |part| self.spec.blocks * part / parts;
        let part = |part| Part {
            first: begin(part),
            blocks: begin(part + 1) - begin(part),
            done: false,
            issued: 0,
            live: Vec::new(),
            claimed: None,
            returned: 0,
        };
        self.parts = (0..parts).map(part).collect();
    }

    fn start_over(&mut self) {
        self.cut_into(u32::try_from(self.parts.len()).expect("at most 8"));
        self.attempt += 1;
    }

    fn unclaimed_parts(&self) -> usize {
        if self.end.is_some() { 0 } else { self.parts.iter().filter(|p| p.unclaimed()).count() }
    }

    fn claimable(&self, tier: TierId) -> bool {
        self.unclaimed_parts() > 0 && self.alive.contains(tier)
    }

    fn unclaimed_blocks(&self) -> u32 {
        let parts = self.parts.iter().filter(|part| self.end.is_none() && part.unclaimed());
        parts.map(|part| part.blocks).sum()
    }

    /// The parts that lie in the read.
    fn covered(&self, read: Read) -> core::ops::Range<usize> {
        let inside =
            |part: &Part| (read.first_block..read.first_block + read.blocks).contains(&part.first);
        let first = self.parts.iter().position(inside).expect("reads begin with a part");
        let count = self.parts.iter().filter(|part| inside(part)).count();
        let blocks: u32 = self.parts[first..first + count].iter().map(|part| part.blocks).sum();
        assert_eq!((self.parts[first].first, blocks), (read.first_block, read.blocks), "{read:?}");
        first..first + count
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
    /// Claims that the pool can keep in mind for duplicates.
    log_room: usize,
    /// A duplicate was put back, or the log is full: reads may have been passed over for good.
    passed_over: bool,
}

impl Oracle {
    pub(crate) fn new(specs: &[ChunkSpec], config: &PoolConfig) -> Self {
        let held = || specs.iter().filter(|spec| !spec.tiers.is_empty());
        let bytes: u64 = held().map(|spec| spec.bytes).sum();
        let chunks = held().count() as u64;
        let share = bytes * u64::from(config.duplicate_percent) / 100;
        let slower = (0..config.tiers).filter(|&tier| tier != config.fastest.0);
        let window = slower.map(|tier| config.windows[usize::from(tier)]).max().unwrap_or(0);
        let windows = u64::from(config.duplicate_windows) * u64::from(window);
        let some = windows.max(config.duplicate_chunks.into()) * bytes / chunks.max(1);
        let few = if chunks == 1 { bytes } else { bytes / 2 };
        Self {
            config: config.clone(),
            chunks: specs.iter().map(|&spec| Chunk::new(spec, config.tail)).collect(),
            gone: TierMask::EMPTY,
            clock: 0,
            budget: share.max(some.min(few)),
            log_room: log_entries(specs.len(), config),
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
        self.chunks.iter().filter(|chunk| chunk.unclaimed_parts() > 0).count()
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
        let most = self.parts_at_once(split, read.chunk);
        self.log();
        let (clock, chunk) = (self.clock, &mut self.chunks[read.chunk]);
        assert_eq!(read.attempt, chunk.attempt);
        chunk.touched = true;
        let covered = chunk.covered(read);
        assert_eq!(Some(covered.start), chunk.parts.iter().position(Part::unclaimed));
        let run = chunk.parts[covered.start..].iter().take_while(|part| part.unclaimed()).count();
        assert_eq!(covered.len(), run.min(most), "{read:?}");
        assert_eq!(read.piece, covered.len() < chunk.parts.len());
        assert_eq!(read.bytes, u64::from(read.blocks) * 1000);
        for part in &mut chunk.parts[covered] {
            part.issued = 1;
            part.claimed.get_or_insert(clock);
            part.live.push((0, read));
        }
    }

    fn log(&mut self) {
        self.clock += 1;
        self.passed_over |= self.clock > self.log_room;
    }

    /// Fewest holders, then most bytes left in the rank, then from the tier's end.
    fn check_order(&self, tier: TierId, index: usize) {
        let taken = &self.chunks[index];
        let holders = |chunk: &Chunk| chunk.spec.tiers.minus(self.gone).len();
        let rank_bytes = |chunk: &Chunk| -> u64 {
            let rank = self.chunks.iter().filter(|other| other.spec.rank == chunk.spec.rank);
            rank.map(|chunk| u64::from(chunk.unclaimed_blocks())).sum()
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

    /// Pieces become smaller as the unclaimed blocks become fewer, per place of the windows of the
    /// tiers that hold the chunk.
    fn parts_at_once(&self, split: Split, index: usize) -> usize {
        let chunk = &self.chunks[index];
        let parts = chunk.parts.len();
        if split == Split::Never || chunk.whole_only || parts == 1 {
            return parts;
        }
        let window = |tier: TierId| f64::from(self.config.windows[tier.index()]);
        let all: f64 = TierMask::all(self.config.tiers).iter().map(window).sum();
        let places: f64 = chunk.spec.tiers.iter().map(window).sum();
        let small = self.chunks.len() as f64 <= 2.0 * all;
        if chunk.spec.tiers.len() == 1 && !small {
            return parts;
        }
        let limits = if small { [1.25, 0.5, 0.2] } else { [1.0, 0.25, 0.0625] };
        let unclaimed: u32 = self.chunks.iter().map(Chunk::unclaimed_blocks).sum();
        let each = f64::from(unclaimed) / f64::from(chunk.spec.blocks);
        let halvings = limits.iter().filter(|&limit| each < limit * places - 1e-9).count();
        (parts >> halvings).max(1)
    }

    fn duplicated(&mut self, tier: TierId, read: Option<Read>) {
        let oldest = self.longest_waited_for(tier);
        let Some(read) = read else {
            let affordable = oldest.is_some_and(|(i, p)| {
                let chunk = &self.chunks[i];
                let whole = if chunk.whole_only { chunk.spec.blocks } else { 0 };
                u64::from(chunk.parts[p].blocks.max(whole)) * 1000 <= self.budget
            });
            assert!(!affordable || self.passed_over, "{tier} could have duplicated {oldest:?}");
            return;
        };
        assert!(read.duplicate && read.tier == tier);
        assert_eq!(self.unclaimed(), 0, "a duplicate came before an unclaimed read");
        let (i, p) = oldest.expect("something to duplicate");
        self.budget = self.budget.checked_sub(read.bytes).expect("within the budget");
        self.log();
        let (clock, chunk) = (self.clock, &mut self.chunks[read.chunk]);
        assert!(chunk.alive.contains(tier));
        let covered = chunk.covered(read);
        assert!(self.passed_over || (i, p) == (read.chunk, covered.start), "not {read:?}");
        assert_eq!(covered.len(), if chunk.whole_only { chunk.parts.len() } else { 1 });
        for part in &mut chunk.parts[covered] {
            assert!(!part.live.is_empty() && part.issued < 3, "{read:?}");
            part.live.push((part.issued, read));
            part.issued += 1;
            part.claimed = Some(clock);
        }
    }

    /// The part whose latest read was claimed first.
    fn longest_waited_for(&self, tier: TierId) -> Option<(usize, usize)> {
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

    /// The parts in which the read is live, each with its number there.
    fn live(&self, read: Read) -> Vec<(usize, usize)> {
        let chunk = &self.chunks[read.chunk];
        let parts = chunk.parts.iter().enumerate().filter(|_| chunk.end.is_none());
        let live = parts.filter_map(|(p, part)| {
            part.live.iter().find(|(_, live)| *live == read).map(|(n, _)| (p, *n))
        });
        live.collect()
    }

    fn completed(&mut self, read: Read) -> Delivery {
        let live = self.live(read);
        if live.is_empty() {
            return Delivery::Late;
        }
        let chunk = &mut self.chunks[read.chunk];
        let mut new_bytes = 0;
        for (p, _) in live {
            chunk.parts[p].done = true;
            chunk.parts[p].live.clear();
            new_bytes += u64::from(chunk.parts[p].blocks) * 1000;
        }
        let chunk_done = chunk.parts.iter().all(|part| part.done);
        assert!(chunk_done || read.piece, "a whole chunk is all of it");
        if chunk_done {
            chunk.end = Some(ChunkStatus::Delivered);
        }
        Delivery::First { new_bytes, chunk_done, step_done: chunk_done && self.all_resolved() }
    }

    fn failed(&mut self, read: Read, failure: Failure) -> Outcome {
        let live = self.live(read);
        if live.is_empty() {
            return Outcome::Ignored;
        }
        let chunk = &mut self.chunks[read.chunk];
        chunk.alive = chunk.alive.without(read.tier);
        self.lose(read, &live, MissReason::Failed(failure))
    }

    fn put_back(&mut self, read: Read) -> Outcome {
        if read.duplicate {
            self.budget += read.bytes;
            self.passed_over = true;
        }
        let live = self.live(read);
        if live.is_empty() {
            return Outcome::Ignored;
        }
        for &(p, number) in &live {
            let part = &mut self.chunks[read.chunk].parts[p];
            part.issued -= usize::from(number + 1 == part.issued);
        }
        self.lose(read, &live, MissReason::TierMasked)
    }

    fn lose(&mut self, read: Read, live: &[(usize, usize)], reason: MissReason) -> Outcome {
        let chunk = &mut self.chunks[read.chunk];
        for &(p, number) in live {
            let part = &mut chunk.parts[p];
            part.live.retain(|(n, _)| *n != number);
            if part.live.is_empty() && part.issued > 0 {
                (part.issued, part.claimed) = (0, None);
                part.returned += 1;
                if part.returned == 4 {
                    chunk.start_over();
                    break;
                }
            }
        }
        chunk.starve(reason);
        let covered = live.iter().all(|&(p, _)| !chunk.parts[p].unclaimed());
        if chunk.end.is_some() {
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
        if self.live(read).is_empty() {
            return Outcome::Ignored;
        }
        let chunk = &mut self.chunks[read.chunk];
        chunk.whole_only = true;
        chunk.start_over();
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
