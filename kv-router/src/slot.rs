//! One chunk's state in one 64-bit word, so that every rule about it is one compare-exchange.
//!
//! ```text
//! bits  0..24  four pieces of 6 bits: readers issued (2), readers live (3), delivered (1)
//! bits 24..40  four generations of 4 bits: how often the piece was returned
//! bits 40..48  the tiers that may still be asked
//! bit  48      the chunk is read in pieces (else piece 0 stands for all of it)
//! bit  49      it must not be read in pieces
//! bits 50..52  attempt: how often it was started over
//! bits 52..56  open, delivered, or the reason of the miss
//! ```
//!
//! A reader is named by attempt, piece, generation and its number among the piece's readers, and a
//! name is not used again while anybody can hold it: each return of a piece costs the chunk a tier,
//! so that at most eight generations follow one another (a claim put back unread takes its name
//! back with it). Whoever comes with a name that is not live any more is late.

use crate::sync::{AtomicU64, Ordering};
use crate::{ChunkStatus, MissReason, TierId, TierMask};

/// Pieces that a chunk is cut into at most.
pub(crate) const PIECES: u8 = 4;
/// Readers of the same blocks at most: the first and two duplicates.
pub(crate) const READERS: u8 = 3;

const PIECE_BITS: u32 = 6;
const GENERATION_AT: u32 = 24;
const ALIVE_AT: u32 = 40;
const SPLIT: u64 = 1 << 48;
const WHOLE_ONLY: u64 = 1 << 49;
const ATTEMPT_AT: u32 = 50;
const RESOLUTION_AT: u32 = 52;
const DELIVERED: u8 = 1;
const FIRST_MISS: u8 = 2;

/// The name of one reader of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) piece: u8,
    pub(crate) reader: u8,
    pub(crate) generation: u8,
    pub(crate) attempt: u8,
    pub(crate) split: bool,
}

impl Token {
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.piece)
            | u64::from(self.reader) << 2
            | u64::from(self.generation) << 4
            | u64::from(self.attempt) << 8
            | u64::from(self.split) << 10
    }

    pub(crate) fn unpack(bits: u64) -> Self {
        Self {
            piece: low_bits(bits, 2),
            reader: low_bits(bits >> 2, 2),
            generation: low_bits(bits >> 4, 4),
            attempt: low_bits(bits >> 8, 2),
            split: bits >> 10 & 1 == 1,
        }
    }
}

#[derive(Clone, Copy)]
struct Piece {
    issued: u8,
    live: u8,
    done: bool,
}

impl Piece {
    const UNCLAIMED: Self = Self { issued: 0, live: 0, done: false };

    fn is_unclaimed(self) -> bool {
        self.issued == 0 && !self.done
    }
}

/// A value of a chunk's state. Transitions return `None` where they do not apply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    /// A chunk nobody has claimed; a miss if no tier holds it.
    pub(crate) fn new(tiers: TierMask) -> Self {
        Self(u64::from(tiers.bits()) << ALIVE_AT).miss_if_starved(PIECES, MissReason::NoReplica)
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

    pub(crate) fn is_split(self) -> bool {
        self.0 & SPLIT != 0
    }

    pub(crate) fn attempt(self) -> u8 {
        self.field(ATTEMPT_AT, 2)
    }

    /// The tiers that may still be asked.
    pub(crate) fn alive(self) -> TierMask {
        TierMask::from_bits(self.field(ALIVE_AT, 8))
    }

    /// Pieces that can be claimed, as a bit set; bit 0 stands for the whole chunk if not split.
    pub(crate) fn unclaimed(self, pieces: u8) -> u8 {
        if !self.is_open() {
            return 0;
        }
        (0..self.parts(pieces))
            .filter(|&p| self.piece(p).is_unclaimed())
            .fold(0, |set, p| set | 1 << p)
    }

    pub(crate) fn status(self, pieces: u8) -> ChunkStatus {
        if let Some(reason) = self.miss_reason() {
            ChunkStatus::Missed(reason)
        } else if self.is_delivered() {
            ChunkStatus::Delivered
        } else if self.unclaimed(pieces) != 0 {
            ChunkStatus::Waiting
        } else {
            ChunkStatus::Reading
        }
    }

    /// The first unclaimed part for `tier`; cuts an untouched chunk into `cut` pieces if that is
    /// more than one.
    pub(crate) fn claim(self, tier: TierId, pieces: u8, cut: u8) -> Option<(Self, Token)> {
        if !self.alive().contains(tier) {
            return None;
        }
        let unclaimed = self.unclaimed(pieces);
        if unclaimed == 0 {
            return None;
        }
        let cuttable = cut > 1 && self.0 & WHOLE_ONLY == 0;
        let word = if cuttable { Self(self.0 | SPLIT) } else { self };
        let piece = low_bits(u64::from(unclaimed.trailing_zeros()), 2);
        let next = word.with_piece(piece, Piece { issued: 1, live: 1, done: false });
        Some((next, next.token(piece, 0)))
    }

    /// One more reader, `tier`, of the blocks that `first` reads.
    pub(crate) fn duplicate(self, tier: TierId, first: Token) -> Option<(Self, Token)> {
        let mut piece = self.piece(first.piece);
        let same = self.is_open() && first == self.token(first.piece, first.reader);
        if !same || piece.live == 0 || piece.issued >= READERS || !self.alive().contains(tier) {
            return None;
        }
        let reader = piece.issued;
        piece.issued += 1;
        piece.live |= 1 << reader;
        Some((self.with_piece(first.piece, piece), self.token(first.piece, reader)))
    }

    /// The reader delivered its blocks.
    pub(crate) fn complete(self, token: Token, pieces: u8) -> Option<Self> {
        let piece = self.live_piece(token)?;
        let next = self.with_piece(token.piece, Piece { live: 0, done: true, ..piece });
        let all_done = (0..next.parts(pieces)).all(|p| next.piece(p).done);
        Some(if all_done { next.with_field(RESOLUTION_AT, 4, DELIVERED) } else { next })
    }

    /// The reader, of `tier`, failed: that tier is not asked again for this chunk.
    pub(crate) fn fail(
        self,
        token: Token,
        tier: TierId,
        pieces: u8,
        reason: MissReason,
    ) -> Option<Self> {
        let piece = self.live_piece(token)?;
        let next = self.retire(token, piece).with_alive(self.alive().without(tier));
        Some(next.miss_if_starved(pieces, reason))
    }

    /// The reader never read.
    pub(crate) fn put_back(self, token: Token, pieces: u8) -> Option<Self> {
        let mut piece = self.live_piece(token)?;
        if token.reader + 1 == piece.issued {
            piece.issued -= 1;
        }
        Some(self.retire(token, piece).miss_if_starved(pieces, MissReason::TierMasked))
    }

    /// The reader's blocks do not fit those delivered so far: start over, in one piece.
    pub(crate) fn start_over(self, token: Token, reason: MissReason) -> Option<Self> {
        self.live_piece(token)?;
        if !self.is_split() {
            return None;
        }
        let empty = u64::from(self.alive().bits()) << ALIVE_AT | WHOLE_ONLY;
        let next = Self(empty).with_field(ATTEMPT_AT, 2, (self.attempt() + 1) & 3);
        Some(next.miss_if_starved(1, reason))
    }

    /// The tier is not asked again for this chunk.
    pub(crate) fn mask(self, tier: TierId, pieces: u8) -> Option<Self> {
        if !self.is_open() || !self.alive().contains(tier) {
            return None;
        }
        let next = self.with_alive(self.alive().without(tier));
        Some(next.miss_if_starved(pieces, MissReason::TierMasked))
    }

    /// The chunk will not be delivered.
    pub(crate) fn miss(self, reason: MissReason) -> Option<Self> {
        self.is_open().then(|| self.missed(reason))
    }

    fn live_piece(self, token: Token) -> Option<Piece> {
        let piece = self.piece(token.piece);
        let live = self.is_open()
            && token == self.token(token.piece, token.reader)
            && piece.live & 1 << token.reader != 0;
        live.then_some(piece)
    }

    /// Takes the reader off its piece, which is unclaimed again if it was the last.
    fn retire(self, token: Token, mut piece: Piece) -> Self {
        piece.live &= !(1 << token.reader);
        if piece.live != 0 || piece.issued == 0 {
            return self.with_piece(token.piece, piece);
        }
        let generation = (self.generation(token.piece) + 1) & 15;
        self.with_piece(token.piece, Piece::UNCLAIMED).with_field(
            GENERATION_AT + 4 * u32::from(token.piece),
            4,
            generation,
        )
    }

    fn miss_if_starved(self, pieces: u8, reason: MissReason) -> Self {
        if self.alive().is_empty() && self.unclaimed(pieces) != 0 {
            self.missed(reason)
        } else {
            self
        }
    }

    fn missed(self, reason: MissReason) -> Self {
        let code = low_bits(reason.index() as u64, 4) + FIRST_MISS;
        self.with_field(RESOLUTION_AT, 4, code)
    }

    fn token(self, piece: u8, reader: u8) -> Token {
        Token {
            piece,
            reader,
            generation: self.generation(piece),
            attempt: self.attempt(),
            split: self.is_split(),
        }
    }

    fn parts(self, pieces: u8) -> u8 {
        if self.is_split() { pieces } else { 1 }
    }

    fn resolution(self) -> u8 {
        self.field(RESOLUTION_AT, 4)
    }

    fn generation(self, piece: u8) -> u8 {
        self.field(GENERATION_AT + 4 * u32::from(piece), 4)
    }

    fn with_alive(self, tiers: TierMask) -> Self {
        self.with_field(ALIVE_AT, 8, tiers.bits())
    }

    fn piece(self, piece: u8) -> Piece {
        let bits = self.field(PIECE_BITS * u32::from(piece), PIECE_BITS);
        Piece { issued: bits & 3, live: bits >> 2 & 7, done: bits >> 5 == 1 }
    }

    fn with_piece(self, index: u8, piece: Piece) -> Self {
        let bits = piece.issued | piece.live << 2 | u8::from(piece.done) << 5;
        self.with_field(PIECE_BITS * u32::from(index), PIECE_BITS, bits)
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

/// The shared word of one chunk.
///
/// Written by every thread that claims or answers, always by a compare-exchange with `AcqRel`: a
/// reader's bytes are written before its `complete`, and whoever sees the chunk done through an
/// `Acquire` load or its own exchange sees the bytes of all its pieces.
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
