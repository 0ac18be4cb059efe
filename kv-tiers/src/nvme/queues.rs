//! In which order the chunks of a class leave: S3-FIFO. New chunks are on probation in a small queue; those that were
//! used meanwhile go to the main queue, where each use lets them pass once more.
//!
//! A queue also holds what has left it since: an entry counts only if its slot still says so. Every operation takes
//! constant time, amortized: a second chance uses up a hit, and what has left is cleared away when it is the half.

use std::collections::VecDeque;

use kv_chunk::Digest;

use crate::nvme::slots::{Place, Queue, Slab, Slot, State};

/// Hits that are told apart.
const HITS_MAX: u8 = 3;
/// Second chances given for one victim at most.
const CHANCES_MAX: usize = 4096;
/// The share of the chunks that are on probation: a quarter kept most hits in the traces that we have (README.md).
const SMALL_PART: usize = 4;
/// Entries that have left and are not worth a clearing.
const LEFT_MIN: usize = 64;

/// Chunks from the eldest to the youngest.
#[derive(Debug, Default)]
struct Fifo {
    /// Place, and tick of its arrival.
    entries: VecDeque<(Place, u64)>,
    live: usize,
}

fn is_in(slab: &Slab, queue: Queue, (place, queued_at): (Place, u64)) -> bool {
    slab.slot(place).is_some_and(|slot| {
        slot.state == State::Live && slot.queue == queue && slot.queued_at == queued_at
    })
}

impl Fifo {
    fn push(&mut self, place: Place, queued_at: u64) {
        self.entries.push_back((place, queued_at));
        self.live += 1;
    }

    /// One of its chunks has left it.
    fn leave(&mut self, slab: &Slab, queue: Queue) {
        self.live -= 1;
        if self.entries.len() > 2 * self.live + LEFT_MIN {
            self.entries.retain(|entry| is_in(slab, queue, *entry));
        }
    }

    /// The eldest chunk.
    fn front(&mut self, slab: &Slab, queue: Queue) -> Option<Place> {
        loop {
            let entry = *self.entries.front()?;
            if is_in(slab, queue, entry) {
                return Some(entry.0);
            }
            self.entries.pop_front();
        }
    }
}

/// The chunks of one class.
#[derive(Debug, Default)]
pub(super) struct Queues {
    small: Fifo,
    main: Fifo,
    ghost: Ghost,
}

impl Queues {
    pub(super) fn len(&self) -> usize {
        self.small.live + self.main.live
    }

    fn fifo(&mut self, queue: Queue) -> &mut Fifo {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// Takes in a chunk that became readable.
    pub(super) fn insert(&mut self, slab: &mut Slab, place: Place, tick: u64) {
        let Some(slot) = slab.slot(place) else { return };
        let is_known = self.ghost.knows(slot.digest, self.len());
        self.enter(slab, place, if is_known { Queue::Main } else { Queue::Small }, tick);
    }

    /// Takes in a chunk as the youngest of the queue that its slot names: at open, from the eldest on.
    pub(super) fn restore(&mut self, place: Place, queue: Queue, queued_at: u64) {
        self.fifo(queue).push(place, queued_at);
    }

    fn enter(&mut self, slab: &mut Slab, place: Place, queue: Queue, tick: u64) {
        if let Some(slot) = slab.slot_mut(place) {
            (slot.queue, slot.queued_at) = (queue, tick);
        }
        self.fifo(queue).push(place, tick);
    }

    /// A chunk of this queue is no longer readable.
    pub(super) fn left(&mut self, slab: &Slab, queue: Queue) {
        self.fifo(queue).leave(slab, queue);
    }

    /// Remembers a victim that left on probation: if it comes back soon, it goes to the main queue.
    pub(super) fn note_evicted(&mut self, slot: &Slot) {
        if slot.queue == Queue::Small {
            let chunks = self.len();
            self.ghost.add(slot.digest, chunks);
        }
    }

    /// Counts a use.
    pub(super) fn touch(&mut self, slab: &mut Slab, place: Place) {
        if let Some(slot) = slab.slot_mut(place) {
            slot.hits = (slot.hits + 1).min(HITS_MAX);
        }
    }

    /// The chunk to drop next.
    pub(super) fn candidate(&mut self, slab: &mut Slab, tick: &mut u64) -> Option<Place> {
        let mut candidate = None;
        for _ in 0..CHANCES_MAX {
            let small_is_due = self.small.live * SMALL_PART >= self.len() || self.main.live == 0;
            let queue = if small_is_due { Queue::Small } else { Queue::Main };
            let place = self.fifo(queue).front(slab, queue)?;
            candidate = Some(place);
            let slot = slab.slot_mut(place)?;
            if slot.hits == 0 {
                break;
            }
            slot.hits = if queue == Queue::Small { 0 } else { slot.hits - 1 };
            self.renew(slab, place, next(tick));
        }
        candidate
    }

    /// Makes a chunk the youngest of the main queue: it was used, or may not be dropped now.
    pub(super) fn renew(&mut self, slab: &mut Slab, place: Place, tick: u64) {
        let Some(slot) = slab.slot(place) else { return };
        let before = slot.queue;
        self.enter(slab, place, Queue::Main, tick);
        self.left(slab, before);
    }
}

pub(super) fn next(tick: &mut u64) -> u64 {
    *tick += 1;
    *tick
}

/// Chunks that were dropped lately: for as many further drops as there are chunks. Fingerprints in small sets, of which
/// the eldest gives way; a mistake costs a place in the queue.
#[derive(Debug, Default)]
struct Ghost {
    /// Fingerprint, and number of the drop.
    sets: Vec<[(u32, u32); SET]>,
    drops: u32,
}

/// Fingerprints in a set of the ghost.
const SET: usize = 8;

impl Ghost {
    fn split(&self, digest: Digest) -> Option<(usize, u32)> {
        let [a, b, c, d, e, f, g, h, ..] = digest.to_bytes();
        let place = u32::from_le_bytes([a, b, c, d]) as usize;
        Some((place & self.sets.len().checked_sub(1)?, u32::from_le_bytes([e, f, g, h])))
    }

    fn age(&self, drop: u32) -> usize {
        if drop == 0 { usize::MAX } else { self.drops.wrapping_sub(drop) as usize }
    }

    fn add(&mut self, digest: Digest, chunks: usize) {
        let wanted = (chunks * 3 / 2 / SET).next_power_of_two();
        if wanted > self.sets.len() {
            self.sets = vec![[(0, 0); SET]; wanted];
            self.drops = 0;
        }
        self.drops = self.drops.wrapping_add(1).max(1);
        let Some((at, fingerprint)) = self.split(digest) else { return };
        let eldest = (0..SET).max_by_key(|&way| self.age(self.sets[at][way].1)).unwrap_or(0);
        self.sets[at][eldest] = (fingerprint, self.drops);
    }

    fn knows(&self, digest: Digest, chunks: usize) -> bool {
        let Some((at, fingerprint)) = self.split(digest) else { return false };
        let is_known =
            |&(known, drop): &(u32, u32)| known == fingerprint && self.age(drop) < chunks;
        self.sets[at].iter().any(is_known)
    }
}
