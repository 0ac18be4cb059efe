//! What the store holds and where: chunks, slots, segments, and the order in which they leave. Pure state, no I/O.
//!
//! A slot goes Free -> Writing -> Live -> (Doomed ->) Wiping -> Free. Only a Free slot is written to, and a slot becomes
//! Free only after its old header was overwritten. Each step is noted for the journal.

mod chunks;
mod filling;

use std::collections::{BTreeMap, BTreeSet};

use kv_chunk::Digest;

use self::chunks::Chunks;
pub(super) use self::filling::{Scope, Settled};
pub(super) use super::slots::{Place, Segment};
use crate::{
    Held, ListCursor, Purpose,
    nvme::{
        files::SegmentFile,
        journal::Change,
        queues::{Queues, next},
        segment::Geometry,
        slots::{Slab, Slot, State},
    },
};

/// A readable chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) place: Place,
    pub(super) held: Held,
}

/// All segments of one record size.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) queues: Queues,
    /// Rows of segments with free slots.
    with_free: BTreeSet<u32>,
    pub(super) free: usize,
    pub(super) slots: usize,
    pub(super) segments: usize,
    /// Slots being wiped. Those whose reads still run do not count: a read can take for ever.
    pub(super) leaving: usize,
    /// Rows by rank, coldest first.
    pub(super) cold: BTreeSet<(u64, u32)>,
}

/// What becomes of a chunk that was made unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doomed {
    /// Nobody reads it: overwrite its header now.
    Wipe(Place),
    /// The last reader's end will say so.
    Later,
}

/// The index.
#[derive(Debug, Default)]
pub(super) struct Index {
    chunks: Chunks,
    classes: BTreeMap<u64, Class>,
    slab: Slab,
    rows: BTreeMap<u64, u32>,
    taken_ids: u64,
    slots: u64,
    tick: u64,
    /// What the journal does not know yet.
    pub(super) changes: Vec<Change>,
}

impl Index {
    pub(super) fn get(&self, digest: Digest) -> Option<Entry> {
        let place = self.chunks.get(&self.slab, digest)?;
        let slot = self.slab.slot(place)?;
        Some(Entry { place, held: slot.held() })
    }

    pub(super) fn chunks(&self) -> impl Iterator<Item = (Digest, Held)> {
        let slots = self.chunks.places().filter_map(|place| self.slab.slot(place));
        slots.map(|slot| (slot.digest, slot.held()))
    }

    /// In the order of their places, which is that of the medium within a segment.
    pub(super) fn chunks_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        let mut left = max.max(1);
        for (place, slot) in self.slab.live_from(Place::at(from)) {
            if left == 0 {
                return Some(place.cursor());
            }
            left -= 1;
            visit(slot.digest, slot.held());
        }
        None
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.slab.iter()
    }

    pub(super) fn segments_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.slab.iter_mut()
    }

    pub(super) fn segment_count(&self) -> usize {
        self.slab.len()
    }

    /// Slots of all segments.
    pub(super) fn slots(&self) -> u64 {
        self.slots
    }

    pub(super) fn segment(&self, row: u32) -> Option<&Segment> {
        self.slab.get(row)
    }

    /// The first segment with this number or a higher one.
    pub(super) fn segment_from(&self, id: u64) -> Option<&Segment> {
        self.rows.range(id..).next().and_then(|(_, row)| self.slab.get(*row))
    }

    /// Rows of all segments.
    pub(super) fn rows(&self) -> impl Iterator<Item = u32> {
        self.rows.values().copied()
    }

    /// The row of the segment with this number.
    pub(super) fn row_of(&self, id: u64) -> Option<u32> {
        self.rows.get(&id).copied()
    }

    pub(super) fn class(&self, record_bytes: u64) -> Option<&Class> {
        self.classes.get(&record_bytes)
    }

    pub(super) fn classes(&self) -> impl Iterator<Item = (u64, &Class)> {
        self.classes.iter().map(|(record_bytes, class)| (*record_bytes, class))
    }

    /// A number that no segment has or had.
    pub(super) fn next_segment_id(&self) -> u64 {
        let known = self.rows.last_key_value().map_or(0, |(id, _)| *id);
        known.max(self.taken_ids) + 1
    }

    /// Keeps numbers up to this one for files that are left alone, or gone.
    pub(super) fn reserve_ids_to(&mut self, id: u64) {
        self.taken_ids = self.taken_ids.max(id);
    }

    /// Grows with every use.
    pub(super) fn tick(&self) -> u64 {
        self.tick
    }

    pub(super) fn quarantined(&self) -> u64 {
        self.slab.iter().map(|segment| u64::from(segment.quarantined)).sum()
    }

    /// Adds a segment whose slots are all free.
    pub(super) fn add_segment(&mut self, file: SegmentFile, geometry: Geometry) -> u32 {
        let row = self.recover_segment(file, geometry);
        self.changes.push(Change::segment_added(&geometry));
        if let Some(segment) = self.slab.get_mut(row) {
            segment.recount();
        }
        self.enlist(row);
        row
    }

    fn enlist(&mut self, row: u32) {
        let Some(segment) = self.slab.get(row) else { return };
        let class = self.classes.entry(segment.geometry.record_bytes).or_insert_with(|| Class {
            queues: Queues::default(),
            with_free: BTreeSet::new(),
            free: 0,
            slots: 0,
            segments: 0,
            leaving: 0,
            cold: BTreeSet::new(),
        });
        class.segments += 1;
        class.slots += segment.slots.len();
        class.free += segment.free.len();
        class.cold.insert((segment.rank(), row));
        if !segment.free.is_empty() {
            class.with_free.insert(row);
        }
    }

    /// Takes an idle segment out, with all its chunks.
    pub(super) fn remove_segment(&mut self, row: u32) -> Option<Segment> {
        let segment = self.slab.get(row)?;
        let Geometry { segment_id, record_bytes, .. } = segment.geometry;
        let digests: Vec<Digest> = segment.live_digests().collect();
        for digest in digests {
            self.forget(digest);
        }
        let segment = self.slab.remove(row)?;
        self.rows.remove(&segment_id);
        self.slots -= segment.slots.len() as u64;
        // Entries of an older index must never meet a new segment under the same number.
        self.reserve_ids_to(segment_id);
        self.changes.push(Change::segment_removed(segment_id));
        if let Some(class) = self.classes.get_mut(&record_bytes) {
            class.segments -= 1;
            class.slots -= segment.slots.len();
            class.free -= segment.free.len();
            class.with_free.remove(&row);
            class.cold.remove(&(segment.rank(), row));
            if class.segments == 0 {
                self.classes.remove(&record_bytes);
            }
        }
        Some(segment)
    }

    /// A free slot, now being written.
    pub(super) fn take_free(&mut self, record_bytes: u64) -> Option<Place> {
        let class = self.classes.get_mut(&record_bytes)?;
        let row = *class.with_free.first()?;
        let segment = self.slab.get_mut(row)?;
        let slot = segment.free.pop()?;
        class.free -= 1;
        if segment.free.is_empty() {
            class.with_free.remove(&row);
        }
        let place = Place { row, slot };
        self.set_state(place, State::Writing);
        Some(place)
    }

    /// Makes the chunk in a written slot readable.
    pub(super) fn publish(&mut self, place: Place, digest: Digest, held: Held) {
        let tick = next(&mut self.tick);
        self.reslot(place, |slot| *slot = Slot::live(digest, held, tick));
        if let Some((slab, class)) = self.parts(place.row) {
            class.queues.insert(slab, place, tick);
        }
        self.chunks.insert(&self.slab, digest, place);
        self.note(place);
    }

    /// Changes a slot and keeps the order of segments by warmth.
    fn reslot(&mut self, place: Place, change: impl FnOnce(&mut Slot)) {
        self.rerank(place.row, |slab| slab.change(place, change));
    }

    fn rerank(&mut self, row: u32, change: impl FnOnce(&mut Slab)) {
        let Some((slab, class)) = self.parts(row) else { return };
        change(slab);
        let Some((before, after)) = slab.get_mut(row).and_then(Segment::rerank) else { return };
        class.cold.remove(&(before, row));
        class.cold.insert((after, row));
    }

    fn parts(&mut self, row: u32) -> Option<(&mut Slab, &mut Class)> {
        let record_bytes = self.slab.get(row)?.geometry.record_bytes;
        Some((&mut self.slab, self.classes.get_mut(&record_bytes)?))
    }

    /// Counts a use of a chunk.
    pub(super) fn touch(&mut self, digest: Digest) {
        let Some(place) = self.chunks.get(&self.slab, digest) else { return };
        let tick = next(&mut self.tick);
        self.reslot(place, |slot| slot.used_at = tick);
        if let Some((slab, class)) = self.parts(place.row) {
            class.queues.touch(slab, place);
        }
    }

    /// A chunk that may not be dropped now is not proposed again soon.
    pub(super) fn spare(&mut self, place: Place) {
        let tick = next(&mut self.tick);
        if let Some((slab, class)) = self.parts(place.row) {
            class.queues.renew(slab, place, tick);
        }
    }

    /// A segment that may not be taken now is not proposed again soon.
    pub(super) fn spare_segment(&mut self, row: u32) {
        let tick = next(&mut self.tick);
        self.rerank(row, |slab| {
            if let Some(segment) = slab.get_mut(row) {
                segment.spare(tick);
            }
        });
    }

    /// The chunk that a class would drop next.
    pub(super) fn candidate(&mut self, record_bytes: u64) -> Option<(Place, Slot)> {
        let class = self.classes.get_mut(&record_bytes)?;
        let place = class.queues.candidate(&mut self.slab, &mut self.tick)?;
        Some((place, *self.slab.slot(place)?))
    }

    /// Makes a chunk unreadable to make room for others.
    pub(super) fn evict(&mut self, digest: Digest) -> Option<Doomed> {
        let place = self.chunks.get(&self.slab, digest)?;
        let slot = *self.slab.slot(place)?;
        let (_, class) = self.parts(place.row)?;
        class.queues.note_evicted(&slot);
        self.doom(digest)
    }

    /// Pins a chunk for a read.
    pub(super) fn begin_read(&mut self, digest: Digest, purpose: Purpose) -> Option<Entry> {
        if purpose == Purpose::Use {
            self.touch(digest);
        }
        let entry = self.get(digest)?;
        self.slab.change(entry.place, |slot| slot.readers += 1);
        Some(entry)
    }

    /// Unpins it. A place returned is to be wiped now.
    pub(super) fn end_read(&mut self, place: Place) -> Option<Place> {
        self.slab.change(place, |slot| slot.readers = slot.readers.saturating_sub(1));
        let slot = self.slab.slot(place)?;
        if slot.readers > 0 || slot.state != State::Doomed {
            return None;
        }
        self.begin_wipe(place);
        Some(place)
    }

    /// Whether a removed chunk in this slot is still being read.
    pub(super) fn is_doomed(&self, place: Place) -> bool {
        self.slab.slot(place).is_some_and(|slot| slot.state == State::Doomed)
    }

    /// Makes a chunk unreadable. `None`: not held.
    pub(super) fn doom(&mut self, digest: Digest) -> Option<Doomed> {
        let place = self.forget(digest)?;
        let is_read = self.slab.slot(place)?.readers > 0;
        if is_read {
            self.set_state(place, State::Doomed);
            return Some(Doomed::Later);
        }
        self.begin_wipe(place);
        Some(Doomed::Wipe(place))
    }

    /// Makes the chunk in this slot unreadable and never uses the slot again. The chunk, if it was still readable.
    pub(super) fn lose(&mut self, place: Place) -> Option<Digest> {
        let slot = *self.slab.slot(place)?;
        match slot.state {
            State::Live => {
                self.forget(slot.digest);
                self.set_state(place, State::Quarantined);
                Some(slot.digest)
            }
            State::Doomed => {
                self.set_state(place, State::Quarantined);
                None
            }
            _ => None,
        }
    }

    /// Counts a failed read of a slot.
    pub(super) fn count_read_error(&mut self, place: Place) -> u8 {
        self.slab.slot_mut(place).map_or(0, |slot| {
            slot.read_errors = slot.read_errors.saturating_add(1);
            slot.read_errors
        })
    }

    /// Its slot is left in no state that counts: the caller sets the next.
    fn forget(&mut self, digest: Digest) -> Option<Place> {
        let place = self.chunks.remove(&self.slab, digest)?;
        let queue = self.slab.slot(place)?.queue;
        self.reslot(place, |slot| slot.state = State::Quarantined);
        if let Some((slab, class)) = self.parts(place.row) {
            class.queues.left(slab, queue);
        }
        Some(place)
    }

    fn begin_wipe(&mut self, place: Place) {
        self.set_state(place, State::Wiping);
        if let Some((_, class)) = self.parts(place.row) {
            class.leaving += 1;
        }
    }

    /// The header of a slot was overwritten, or that failed.
    pub(super) fn end_wipe(&mut self, place: Place, wiped: bool) {
        if let Some((_, class)) = self.parts(place.row) {
            class.leaving -= 1;
        }
        self.end_use(place, wiped);
    }

    /// A write into a slot failed; `clean` if nothing can have changed its header.
    pub(super) fn end_failed_write(&mut self, place: Place, clean: bool) {
        self.end_use(place, clean);
    }

    fn end_use(&mut self, place: Place, reusable: bool) {
        if !reusable {
            return self.set_state(place, State::Quarantined);
        }
        let readers = self.slab.slot(place).map_or(0, |slot| slot.readers);
        debug_assert_eq!(readers, 0, "a slot that is read is not freed");
        self.slab.change(place, |slot| *slot = Slot::FREE);
        self.note(place);
        if let Some((slab, class)) = self.parts(place.row)
            && let Some(segment) = slab.get_mut(place.row)
        {
            segment.free.push(place.slot);
            class.free += 1;
            class.with_free.insert(place.row);
        }
    }

    fn set_state(&mut self, place: Place, state: State) {
        self.reslot(place, |slot| slot.state = state);
        self.note(place);
    }

    /// Notes the state of a slot for the journal.
    pub(super) fn note(&mut self, place: Place) {
        let Some(segment) = self.slab.get(place.row) else { return };
        let Some(slot) = segment.slots.get(place.slot as usize) else { return };
        let id = segment.geometry.segment_id;
        self.changes.push(Change::of_slot(id, place.slot, slot));
    }
}
