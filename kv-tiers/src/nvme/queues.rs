//! In which order the chunks of a class leave: S3-FIFO, or for comparison SIEVE or least recently used.
//!
//! Every operation takes constant time, amortized: a second chance uses up a hit.

use kv_chunk::Digest;

use crate::nvme::{
    config::Eviction,
    slots::{Place, Queue, Slab, Slot},
};

/// Hits that are told apart.
const HITS_MAX: u8 = 3;
/// Second chances given for one victim at most.
const CHANCES_MAX: usize = 4096;
/// The share of the chunks that are on probation: a quarter kept most hits in the traces that we have (README.md).
const SMALL_PART: usize = 4;

/// Chunks from the eldest to the youngest, linked through their slots.
#[derive(Debug)]
struct List {
    head: Place,
    tail: Place,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { head: Place::NONE, tail: Place::NONE, len: 0 }
    }
}

impl List {
    fn push(&mut self, slab: &mut Slab, place: Place) {
        let tail = std::mem::replace(&mut self.tail, place);
        match slab.slot_mut(tail) {
            Some(last) => last.next = place,
            None => self.head = place,
        }
        if let Some(slot) = slab.slot_mut(place) {
            (slot.prev, slot.next) = (tail, Place::NONE);
        }
        self.len += 1;
    }

    fn remove(&mut self, slab: &mut Slab, place: Place) {
        let Some(&Slot { prev, next, .. }) = slab.slot(place) else { return };
        match slab.slot_mut(prev) {
            Some(slot) => slot.next = next,
            None => self.head = next,
        }
        match slab.slot_mut(next) {
            Some(slot) => slot.prev = prev,
            None => self.tail = prev,
        }
        self.len -= 1;
    }
}

/// The chunks of one class.
#[derive(Debug)]
pub(super) struct Queues {
    policy: Eviction,
    small: List,
    main: List,
    /// Where SIEVE looks next.
    hand: Place,
    ghost: Ghost,
}

impl Queues {
    pub(super) fn new(policy: Eviction) -> Self {
        let (small, main) = (List::default(), List::default());
        Self { policy, small, main, hand: Place::NONE, ghost: Ghost::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.small.len + self.main.len
    }

    fn list(&mut self, queue: Queue) -> &mut List {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// Takes in a chunk that became readable.
    pub(super) fn insert(&mut self, slab: &mut Slab, place: Place, tick: u64) {
        let Some(slot) = slab.slot(place) else { return };
        let is_new = self.policy == Eviction::S3Fifo && !self.ghost.knows(slot.digest, self.len());
        self.enter(slab, place, if is_new { Queue::Small } else { Queue::Main }, tick);
    }

    /// Takes in a chunk as the youngest of the queue that its slot names: at open, from the eldest on.
    pub(super) fn restore(&mut self, slab: &mut Slab, place: Place) {
        let Some(slot) = slab.slot_mut(place) else { return };
        if self.policy != Eviction::S3Fifo {
            slot.queue = Queue::Main;
        }
        let queue = slot.queue;
        self.list(queue).push(slab, place);
    }

    fn enter(&mut self, slab: &mut Slab, place: Place, queue: Queue, tick: u64) {
        if let Some(slot) = slab.slot_mut(place) {
            (slot.queue, slot.queued_at) = (queue, tick);
        }
        self.list(queue).push(slab, place);
    }

    /// Takes a chunk out that is no longer readable.
    pub(super) fn remove(&mut self, slab: &mut Slab, place: Place) {
        let Some(&Slot { queue, next, .. }) = slab.slot(place) else { return };
        if self.hand == place {
            self.hand = next;
        }
        self.list(queue).remove(slab, place);
    }

    /// Remembers a victim that left on probation: if it comes back soon, it goes to the main queue.
    pub(super) fn note_evicted(&mut self, slot: &Slot) {
        if self.policy == Eviction::S3Fifo && slot.queue == Queue::Small {
            let chunks = self.len();
            self.ghost.add(slot.digest, chunks);
        }
    }

    /// Counts a use.
    pub(super) fn touch(&mut self, slab: &mut Slab, place: Place, tick: u64) {
        if self.policy == Eviction::Lru {
            return self.renew(slab, place, tick);
        }
        if let Some(slot) = slab.slot_mut(place) {
            slot.hits = (slot.hits + 1).min(HITS_MAX);
        }
    }

    /// The chunk to drop next.
    pub(super) fn candidate(&mut self, slab: &mut Slab, tick: &mut u64) -> Option<Place> {
        match self.policy {
            Eviction::Lru => slab.slot(self.main.head).map(|_| self.main.head),
            Eviction::Sieve => self.sieve(slab),
            Eviction::S3Fifo => self.s3_fifo(slab, tick),
        }
    }

    fn sieve(&mut self, slab: &mut Slab) -> Option<Place> {
        for _ in 0..CHANCES_MAX {
            if self.hand == Place::NONE {
                self.hand = self.main.head;
            }
            let slot = slab.slot_mut(self.hand)?;
            if slot.hits == 0 {
                break;
            }
            slot.hits = 0;
            self.hand = slot.next;
        }
        if self.hand == Place::NONE {
            self.hand = self.main.head;
        }
        slab.slot(self.hand).map(|_| self.hand)
    }

    fn s3_fifo(&mut self, slab: &mut Slab, tick: &mut u64) -> Option<Place> {
        let mut place = Place::NONE;
        for _ in 0..CHANCES_MAX {
            let small_is_due = self.small.len * SMALL_PART >= self.len() || self.main.len == 0;
            place = if small_is_due { self.small.head } else { self.main.head };
            let slot = slab.slot_mut(place)?;
            if slot.hits == 0 {
                break;
            }
            slot.hits = if slot.queue == Queue::Small { 0 } else { slot.hits - 1 };
            self.renew(slab, place, next(tick));
        }
        slab.slot(place).map(|_| place)
    }

    /// Makes a chunk the youngest of the main queue: it was used, or may not be dropped now.
    pub(super) fn renew(&mut self, slab: &mut Slab, place: Place, tick: u64) {
        self.remove(slab, place);
        self.enter(slab, place, Queue::Main, tick);
    }
}

pub(super) fn next(tick: &mut u64) -> u64 {
    *tick += 1;
    *tick
}

/// Chunks that were dropped lately: for as many further drops as there are chunks. Fingerprints in a table in which a
/// later one takes an earlier one's place; a mistake costs a place in the queue.
#[derive(Debug, Default)]
struct Ghost {
    /// Fingerprint, and number of the drop.
    table: Vec<(u32, u32)>,
    drops: u32,
}

impl Ghost {
    fn split(&self, digest: Digest) -> Option<(usize, u32)> {
        let [a, b, c, d, e, f, g, h, ..] = digest.to_bytes();
        let place = u32::from_le_bytes([a, b, c, d]) as usize;
        Some((place & self.table.len().checked_sub(1)?, u32::from_le_bytes([e, f, g, h])))
    }

    fn add(&mut self, digest: Digest, chunks: usize) {
        let wanted = (chunks * 2).next_power_of_two().max(16);
        if wanted > self.table.len() {
            self.table = vec![(0, 0); wanted];
            self.drops = 0;
        }
        self.drops = self.drops.wrapping_add(1);
        if let Some((at, fingerprint)) = self.split(digest) {
            self.table[at] = (fingerprint, self.drops);
        }
    }

    fn knows(&self, digest: Digest, chunks: usize) -> bool {
        let Some((at, fingerprint)) = self.split(digest) else { return false };
        let (known, drop) = self.table[at];
        let age = self.drops.wrapping_sub(drop) as usize;
        drop != 0 && known == fingerprint && age < chunks
    }
}
