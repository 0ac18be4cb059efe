//! One chunk's state in one 64-bit word, so that every rule about it is one compare-exchange.
//!
//! ```text
//! bits  0..32  eight parts of 4 bits: readers issued and which of them are live, or delivered
//! bits 32..48  eight generations of 2 bits: how often the part was returned
//! bits 48..56  the tiers that may still be asked
//! bit  56      it must not be read in pieces
//! bits 57..60  attempt: how often it was started over
//! bits 60..64  open, delivered, or the reason of the miss
//! ```
//!
//! A read covers a run of parts. A reader is named by attempt, run, generations and its number
//! among the readers of those parts, and a name is never used again while anybody can hold it. A
//! claim put back unread takes its name back with it; only where a later reader of the same blocks
//! is there does its number stay used. A part all of whose readers are gone is returned, in its
//! next generation; the fourth return starts the chunk over, in the next attempt. The last attempt
//! has no duplicates, so that returns cost a tier each there, and a fourth one makes the chunk a
//! miss rather than begin the names again. Whoever comes with a name that is not live any more is
//! late.

use crate::sync::{AtomicU64, Ordering};
use crate::{ChunkStatus, MissReason, TierId, TierMask};

/// Parts that a chunk consists of at most: the smallest pieces are single parts.
pub(crate) const PARTS: u8 = 8;
/// Readers of the same blocks at most: the first and two duplicates.
pub(crate) const READERS: u8 = 3;

const PART_BITS: u32 = 4;
const GENERATION_AT: u32 = 32;
const GENERATION_BITS: u32 = 2;
const LAST_GENERATION: u8 = 3;
const ALIVE_AT: u32 = 48;
const WHOLE_ONLY: u64 = 1 << 56;
const ATTEMPT_AT: u32 = 57;
const ATTEMPT_BITS: u32 = 3;
const LAST_ATTEMPT: u8 = 7;
const RESOLUTION_AT: u32 = 60;
const DELIVERED: u8 = 1;
const FIRST_MISS: u8 = 2;

/// The name of one reader of one chunk: of the parts `first..first + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) first: u8,
    pub(crate) count: u8,
    pub(crate) reader: u8,
    attempt: u8,
    /// Those of all the chunk's parts that the read covers, in their places; 0 elsewhere.
    generations: u16,
}

impl Token {
    pub(crate) fn pack(self) -> u32 {
        u32::from(self.first)
            | u32::from(self.count) << 3
            | u32::from(self.reader) << 7
            | u32::from(self.attempt) << 9
            | u32::from(self.generations) << 12
    }

    pub(crate) fn unpack(bits: u32) -> Self {
        let generations = (bits >> 12 & 0xffff).to_le_bytes();
        Self {
            first: low_bits(bits.into(), 3),
            count: low_bits((bits >> 3).into(), 4),
            reader: low_bits((bits >> 7).into(), 2),
            attempt: low_bits((bits >> 9).into(), 3),
            generations: u16::from_le_bytes([generations[0], generations[1]]),
        }
    }

    /// The parts that it covers, as a bit set.
    pub(crate) fn parts(self) -> u8 {
        run(self.first, self.count)
    }

    pub(crate) fn attempt(self) -> u8 {
        self.attempt
    }

    fn generation(self, part: u8) -> u8 {
        low_bits(
            u64::from(self.generations) >> (GENERATION_BITS * u32::from(part)),
            GENERATION_BITS,
        )
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Unclaimed,
    /// `live` has a bit for each reader that has not answered; never empty.
    Reading {
        issued: u8,
        live: u8,
    },
    Done,
}

impl Part {
    /// One code for each issued number and set of live readers: 2, 3..=5, 6..=12.
    fn code(self) -> u8 {
        match self {
            Self::Unclaimed => 0,
            Self::Done => 1,
            Self::Reading { issued: 1, .. } => 2,
            Self::Reading { issued: 2, live } => 2 + live,
            Self::Reading { live, .. } => 5 + live,
        }
    }

    fn of(code: u8) -> Self {
        match code {
            0 => Self::Unclaimed,
            1 => Self::Done,
            2 => Self::Reading { issued: 1, live: 1 },
            3..=5 => Self::Reading { issued: 2, live: code - 2 },
            _ => Self::Reading { issued: 3, live: code - 5 },
        }
    }
}

/// A value of a chunk's state. Transitions return `None` where they do not apply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    /// A chunk nobody has claimed; a miss if no tier holds it.
    pub(crate) fn new(tiers: TierMask) -> Self {
        Self(u64::from(tiers.bits()) << ALIVE_AT).miss_if_starved(PARTS, MissReason::NoReplica)
    }

    pub(crate) fn is_open(self) -> bool {
        self.resolution() == 0
    }

    pub(crate) fn is_delivered(self) -> bool {
        self.resolution() == DELIVERED
    }

    pub(crate) fn miss_reason(self) -> Option<MissReason> {
        let reason = self.resolution().checked_sub(FIRST_MISS)?;
        MissReason::ALL.get(usize::from(reason)).copied()
    }

    /// The tiers that may still be asked.
    pub(crate) fn alive(self) -> TierMask {
        TierMask::from_bits(self.field(ALIVE_AT, 8))
    }

    /// Parts that can be claimed, of the chunk's `parts`, as a bit set.
    pub(crate) fn unclaimed(self, parts: u8) -> u8 {
        if self.is_open() { self.set(parts, |part| part == Part::Unclaimed) } else { 0 }
    }

    pub(crate) fn status(self, parts: u8) -> ChunkStatus {
        if let Some(reason) = self.miss_reason() {
            ChunkStatus::Missed(reason)
        } else if self.is_delivered() {
            ChunkStatus::Delivered
        } else if self.unclaimed(parts) != 0 {
            ChunkStatus::Waiting
        } else {
            ChunkStatus::Reading
        }
    }

    /// The first unclaimed parts for `tier`, at most `most` of them.
    pub(crate) fn claim(self, tier: TierId, parts: u8, most: u8) -> Option<(Self, Token)> {
        let unclaimed = self.unclaimed(parts);
        if unclaimed == 0 || !self.alive().contains(tier) {
            return None;
        }
        let (first, count) = self.first_run(unclaimed, parts, most);
        let mut next = self;
        for part in first..first + count {
            next = next.with_part(part, Part::Reading { issued: 1, live: 1 });
        }
        Some((next, next.token(first, count, 0)))
    }

    /// One more reader, `tier`, of at most `most` of the parts that `last` reads, where nobody
    /// claimed them after it and they are not delivered.
    pub(crate) fn duplicate(
        self,
        tier: TierId,
        last: Token,
        parts: u8,
        most: u8,
    ) -> Option<(Self, Token)> {
        let reader = last.reader + 1;
        let named = reader < READERS && self.attempt() < LAST_ATTEMPT;
        if !self.is_open() || !named || !self.alive().contains(tier) {
            return None;
        }
        let is_last = |part| matches!(part, Part::Reading { issued, .. } if issued == reader);
        let set = self.named(last) & self.set(parts, is_last);
        if set == 0 {
            return None;
        }
        let (first, count) = self.first_run(set, parts, most);
        let mut next = self;
        for part in first..first + count {
            if let Part::Reading { issued, live } = next.part(part) {
                let live = live | 1 << reader;
                next = next.with_part(part, Part::Reading { issued: issued + 1, live });
            }
        }
        Some((next, next.token(first, count, reader)))
    }

    /// The reader delivered its blocks. Gives the parts of which this is the first delivery.
    pub(crate) fn complete(self, token: Token, parts: u8) -> Option<(Self, u8)> {
        let new = self.live(token)?;
        let mut next = self;
        for part in members(new) {
            next = next.with_part(part, Part::Done);
        }
        if next.set(parts, |part| part != Part::Done) == 0 {
            next = next.with_field(RESOLUTION_AT, 4, DELIVERED);
        }
        Some((next, new))
    }

    /// The reader, of `tier`, failed: that tier is not asked again for this chunk.
    pub(crate) fn fail(
        self,
        token: Token,
        tier: TierId,
        parts: u8,
        reason: MissReason,
    ) -> Option<Self> {
        let live = self.live(token)?;
        let next = self.with_alive(self.alive().without(tier));
        Some(next.retire(live, token.reader, Some(reason)).miss_if_starved(parts, reason))
    }

    /// The reader never read.
    pub(crate) fn put_back(self, token: Token, parts: u8) -> Option<Self> {
        let next = self.retire(self.live(token)?, token.reader, None);
        Some(next.miss_if_starved(parts, MissReason::TierMasked))
    }

    /// The reader's blocks do not fit those delivered so far: start over, in one piece.
    pub(crate) fn start_over(self, token: Token, parts: u8, reason: MissReason) -> Option<Self> {
        self.live(token)?;
        if self.is_whole_only() {
            return None;
        }
        Some(Self(self.afresh(reason).0 | WHOLE_ONLY).miss_if_starved(parts, reason))
    }

    /// The tier is not asked again for this chunk.
    pub(crate) fn mask(self, tier: TierId, parts: u8) -> Option<Self> {
        if !self.is_open() || !self.alive().contains(tier) {
            return None;
        }
        let next = self.with_alive(self.alive().without(tier));
        Some(next.miss_if_starved(parts, MissReason::TierMasked))
    }

    /// The chunk will not be delivered.
    pub(crate) fn miss(self, reason: MissReason) -> Option<Self> {
        self.is_open().then(|| self.missed(reason))
    }

    /// Of the parts that the token names, those that its reader may still deliver; `None` if none.
    fn live(self, token: Token) -> Option<u8> {
        let is_live =
            |part| matches!(part, Part::Reading { live, .. } if live & 1 << token.reader != 0);
        let live = self.named(token) & self.set(PARTS, is_live);
        (self.is_open() && live != 0).then_some(live)
    }

    /// The parts of the token's run that were not returned since it was given out.
    fn named(self, token: Token) -> u8 {
        if self.attempt() != token.attempt {
            return 0;
        }
        let same = |&part: &u8| self.generation(part) == token.generation(part);
        members(token.parts()).filter(same).fold(0, |set, part| set | 1 << part)
    }

    /// Takes the reader off these parts; a part is unclaimed again if it was the last one there.
    /// One that did not fail was put back: it returns its number if no later one was issued.
    fn retire(self, parts: u8, reader: u8, failed: Option<MissReason>) -> Self {
        let mut next = self;
        for index in members(parts) {
            let Part::Reading { mut issued, mut live } = next.part(index) else { continue };
            live &= !(1 << reader);
            issued -= u8::from(failed.is_none() && reader + 1 == issued);
            if live != 0 {
                next = next.with_part(index, Part::Reading { issued, live });
                continue;
            }
            next = next.with_part(index, Part::Unclaimed);
            if issued != 0 {
                if next.generation(index) == LAST_GENERATION {
                    return next.afresh(failed.unwrap_or(MissReason::TierMasked));
                }
                next = next.with_generation(index, next.generation(index) + 1);
            }
        }
        next
    }

    /// Nothing claimed or delivered, in the next attempt; a miss if that was the last one.
    fn afresh(self, reason: MissReason) -> Self {
        if self.attempt() == LAST_ATTEMPT {
            return self.missed(reason);
        }
        let kept = u64::from(self.alive().bits()) << ALIVE_AT | self.0 & WHOLE_ONLY;
        Self(kept).with_field(ATTEMPT_AT, ATTEMPT_BITS, self.attempt() + 1)
    }

    /// The first run of members of `set`, at most `most` long; the whole chunk where it must not be
    /// read in pieces, since all its parts are in the same state then.
    fn first_run(self, set: u8, parts: u8, most: u8) -> (u8, u8) {
        let first = low_bits(set.trailing_zeros().into(), 3);
        let length = low_bits((set >> first).trailing_ones().into(), 4);
        (first, length.min(if self.is_whole_only() { parts } else { most.max(1) }))
    }

    fn miss_if_starved(self, parts: u8, reason: MissReason) -> Self {
        if self.alive().is_empty() && self.unclaimed(parts) != 0 {
            self.missed(reason)
        } else {
            self
        }
    }

    fn missed(self, reason: MissReason) -> Self {
        let code = low_bits(reason.index() as u64, 4) + FIRST_MISS;
        self.with_field(RESOLUTION_AT, 4, code)
    }

    fn token(self, first: u8, count: u8, reader: u8) -> Token {
        let mask = (1_u64 << (GENERATION_BITS * u32::from(count))) - 1;
        let at = GENERATION_BITS * u32::from(first);
        let bytes = (self.0 >> GENERATION_AT & mask << at).to_le_bytes();
        let generations = u16::from_le_bytes([bytes[0], bytes[1]]);
        Token { first, count, reader, attempt: self.attempt(), generations }
    }

    /// The parts, of the first `parts`, that `is` says of.
    fn set(self, parts: u8, is: impl Fn(Part) -> bool) -> u8 {
        (0..parts).filter(|&part| is(self.part(part))).fold(0, |set, part| set | 1 << part)
    }

    fn is_whole_only(self) -> bool {
        self.0 & WHOLE_ONLY != 0
    }

    fn attempt(self) -> u8 {
        self.field(ATTEMPT_AT, ATTEMPT_BITS)
    }

    fn resolution(self) -> u8 {
        self.field(RESOLUTION_AT, 4)
    }

    fn with_alive(self, tiers: TierMask) -> Self {
        self.with_field(ALIVE_AT, 8, tiers.bits())
    }

    fn generation(self, part: u8) -> u8 {
        self.field(GENERATION_AT + GENERATION_BITS * u32::from(part), GENERATION_BITS)
    }

    fn with_generation(self, part: u8, generation: u8) -> Self {
        let at = GENERATION_AT + GENERATION_BITS * u32::from(part);
        self.with_field(at, GENERATION_BITS, generation)
    }

    fn part(self, part: u8) -> Part {
        Part::of(self.field(PART_BITS * u32::from(part), PART_BITS))
    }

    fn with_part(self, index: u8, part: Part) -> Self {
        self.with_field(PART_BITS * u32::from(index), PART_BITS, part.code())
    }

    fn field(self, at: u32, bits: u32) -> u8 {
        low_bits(self.0 >> at, bits)
    }

    fn with_field(self, at: u32, bits: u32, value: u8) -> Self {
        let mask = (1_u64 << bits) - 1;
        Self(self.0 & !(mask << at) | (u64::from(value) & mask) << at)
    }
}

fn low_bits(value: u64, bits: u32) -> u8 {
    (value & ((1 << bits) - 1)).to_le_bytes()[0]
}

/// The set of `count` parts from `first` on.
fn run(first: u8, count: u8) -> u8 {
    low_bits(((1 << count) - 1) << first, 8)
}

fn members(set: u8) -> impl Iterator<Item = u8> {
    (0..PARTS).filter(move |&part| set & 1 << part != 0)
}

/// The shared word of one chunk.
///
/// Written by every thread that claims or answers, always by a compare-exchange with `AcqRel`: a
/// reader's bytes are written before its `complete`, and whoever sees the chunk done through an
/// `Acquire` load or its own exchange sees the bytes of all its parts.
pub(crate) struct Slot(AtomicU64);

impl Slot {
    pub(crate) fn new(word: Word) -> Self {
        Self(AtomicU64::new(word.0))
    }

    pub(crate) fn load(&self) -> Word {
        Word(self.0.load(Ordering::Acquire))
    }

    /// Applies a transition; `Err` has the word to which it did not apply.
    pub(crate) fn update<T>(
        &self,
        step: impl Fn(Word) -> Option<(Word, T)>,
    ) -> Result<Change<T>, Word> {
        let mut old = self.load();
        loop {
            let (new, with) = step(old).ok_or(old)?;
            match self.0.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(Change { old, new, with }),
                Err(seen) => old = Word(seen),
            }
        }
    }
}

/// A transition that took place.
pub(crate) struct Change<T> {
    pub(crate) old: Word,
    pub(crate) new: Word,
    pub(crate) with: T,
}
