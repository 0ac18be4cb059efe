//! What the store holds and where: chunks, slots, segments, and the order of last use. Pure state, no I/O.
//!
//! A slot goes Free -> Writing -> Live -> (Doomed ->) Wiping -> Free. Only a Free slot is written to, and a slot becomes
//! Free only after its old header was overwritten.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use hashlink::LinkedHashSet;
use kv_chunk::Digest;

use crate::{
    Held, Purpose,
    nvme::{files::SegmentFile, segment::Geometry},
};

/// A slot of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) segment: u64,
    pub(super) slot: u32,
}

/// A readable chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) place: Place,
    pub(super) held: Held,
    /// Tick of its last use.
    pub(super) used_at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Writing,
    Live(Digest),
    /// No longer readable; reads of it still run.
    Doomed,
    /// Its header is to be overwritten, or is being so.
    Wiping,
    /// Never used again: a write to it failed, or what it holds is not ours.
    Quarantined,
}

#[derive(Clone, Copy, Debug)]
struct SlotInfo {
    state: State,
    readers: u32,
    read_errors: u8,
}

/// A segment file and its slots.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) file: Arc<SegmentFile>,
    /// The file before a change of the way of I/O: requests may still name its place in the ring's table.
    former_file: Option<Arc<SegmentFile>>,
    pub(super) geometry: Geometry,
    slots: Vec<SlotInfo>,
    pub(super) live: u32,
    /// Tick of the last use of any of its chunks.
    pub(super) last_used: u64,
}

impl Segment {
    /// Whether nothing is read from or written to it.
    pub(super) fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| {
            let at_rest = matches!(slot.state, State::Free | State::Live(_) | State::Quarantined);
            at_rest && slot.readers == 0
        })
    }

    /// Uses another opening of the same file from now on.
    pub(super) fn replace_file(&mut self, file: Arc<SegmentFile>) {
        self.former_file = Some(std::mem::replace(&mut self.file, file));
    }

    /// All openings of its file.
    pub(super) fn files(&self) -> impl Iterator<Item = &Arc<SegmentFile>> {
        [&self.file].into_iter().chain(&self.former_file)
    }

    /// Its readable chunks.
    pub(super) fn digests(&self) -> Vec<Digest> {
        let live = |slot: &SlotInfo| match slot.state {
            State::Live(digest) => Some(digest),
            _ => None,
        };
        self.slots.iter().filter_map(live).collect()
    }
}

/// All segments of one record size.
#[derive(Debug, Default)]
pub(super) struct Class {
    /// Readable chunks, least recently used first.
    pub(super) order: LinkedHashSet<Digest>,
    free: Vec<Place>,
    pub(super) segments: usize,
    /// Slots being wiped. Those whose reads still run do not count: a read can take for ever.
    pub(super) leaving: usize,
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
    chunks: HashMap<Digest, Entry>,
    classes: BTreeMap<u64, Class>,
    segments: BTreeMap<u64, Segment>,
    taken_ids: u64,
    tick: u64,
}

impl Index {
    pub(super) fn get(&self, digest: Digest) -> Option<&Entry> {
        self.chunks.get(&digest)
    }

    pub(super) fn chunks(&self) -> impl Iterator<Item = (Digest, Held)> {
        self.chunks.iter().map(|(digest, entry)| (*digest, entry.held))
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.values()
    }

    pub(super) fn segments_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.segments.values_mut()
    }

    pub(super) fn segment(&self, id: u64) -> Option<&Segment> {
        self.segments.get(&id)
    }

    pub(super) fn class(&self, record_bytes: u64) -> Option<&Class> {
        self.classes.get(&record_bytes)
    }

    /// A number that no file in the directory has.
    pub(super) fn next_segment_id(&self) -> u64 {
        let known = self.segments.last_key_value().map_or(0, |(id, _)| *id);
        known.max(self.taken_ids) + 1
    }

    /// Keeps numbers up to this one for files that are left alone.
    pub(super) fn reserve_ids_to(&mut self, id: u64) {
        self.taken_ids = self.taken_ids.max(id);
    }

    pub(super) fn quarantined(&self) -> u64 {
        let count = |segment: &Segment| {
            segment.slots.iter().filter(|slot| slot.state == State::Quarantined).count() as u64
        };
        self.segments.values().map(count).sum()
    }

    /// Adds a segment whose slots are all free.
    pub(super) fn add_segment(&mut self, file: SegmentFile, geometry: Geometry) {
        let id = geometry.segment_id;
        let slot = SlotInfo { state: State::Free, readers: 0, read_errors: 0 };
        let slots = vec![slot; geometry.slots as usize];
        let last_used = self.next_tick();
        let class = self.classes.entry(geometry.record_bytes).or_default();
        class.segments += 1;
        class.free.extend((0..geometry.slots).rev().map(|slot| Place { segment: id, slot }));
        let file = Arc::new(file);
        let segment = Segment { file, former_file: None, geometry, slots, live: 0, last_used };
        self.segments.insert(id, segment);
    }

    /// Takes an idle segment out, with all its chunks.
    pub(super) fn remove_segment(&mut self, id: u64) -> Option<Segment> {
        let segment = self.segments.remove(&id)?;
        if let Some(class) = self.classes.get_mut(&segment.geometry.record_bytes) {
            class.segments -= 1;
            class.free.retain(|place| place.segment != id);
            for digest in segment.digests() {
                class.order.remove(&digest);
                self.chunks.remove(&digest);
            }
            if class.segments == 0 {
                self.classes.remove(&segment.geometry.record_bytes);
            }
        }
        Some(segment)
    }

    /// A free slot, now being written.
    pub(super) fn take_free(&mut self, record_bytes: u64) -> Option<Place> {
        let place = self.classes.get_mut(&record_bytes)?.free.pop()?;
        self.set_state(place, State::Writing);
        Some(place)
    }

    /// Makes the chunk in a written slot readable.
    pub(super) fn publish(&mut self, place: Place, digest: Digest, held: Held) {
        let used_at = self.next_tick();
        self.insert(place, digest, Entry { place, held, used_at });
    }

    fn insert(&mut self, place: Place, digest: Digest, entry: Entry) {
        self.set_state(place, State::Live(digest));
        let Some(segment) = self.segments.get_mut(&place.segment) else { return };
        segment.live += 1;
        segment.last_used = segment.last_used.max(entry.used_at);
        let class = self.classes.entry(segment.geometry.record_bytes).or_default();
        class.order.insert(digest);
        self.chunks.insert(digest, entry);
    }

    /// A slot found live at open. False if the chunk is already known from another slot.
    pub(super) fn recover(&mut self, place: Place, digest: Digest, held: Held) -> bool {
        if self.chunks.contains_key(&digest) {
            return false;
        }
        self.unfree(place);
        self.insert(place, digest, Entry { place, held, used_at: 0 });
        true
    }

    /// A free slot found with something that must be overwritten first.
    pub(super) fn recover_torn(&mut self, place: Place) {
        self.unfree(place);
        self.begin_wipe(place);
    }

    /// A free slot found unusable.
    pub(super) fn recover_unusable(&mut self, place: Place) {
        self.unfree(place);
        self.set_state(place, State::Quarantined);
    }

    /// Ends recovery: forgets that slots were free, in one pass.
    pub(super) fn settle_recovery(&mut self) {
        let segments = &mut self.segments;
        for class in self.classes.values_mut() {
            class.free.retain(|place| {
                let segment = segments.get(&place.segment);
                segment
                    .is_some_and(|segment| segment.slots[place.slot as usize].state == State::Free)
            });
        }
        for segment in segments.values_mut() {
            segment.last_used = 0;
        }
    }

    /// The free list is cleaned once, by `settle_recovery`.
    fn unfree(&mut self, place: Place) {
        self.set_state(place, State::Writing);
    }

    /// Counts a use of a chunk.
    pub(super) fn touch(&mut self, digest: Digest) {
        let tick = self.next_tick();
        let Some(entry) = self.chunks.get_mut(&digest) else { return };
        entry.used_at = tick;
        let Some(segment) = self.segments.get_mut(&entry.place.segment) else { return };
        segment.last_used = tick;
        if let Some(class) = self.classes.get_mut(&segment.geometry.record_bytes) {
            class.order.to_back(&digest);
        }
    }

    /// Pins a chunk for a read.
    pub(super) fn begin_read(&mut self, digest: Digest, purpose: Purpose) -> Option<Entry> {
        if purpose == Purpose::Use {
            self.touch(digest);
        }
        let entry = *self.chunks.get(&digest)?;
        self.slot_mut(entry.place)?.readers += 1;
        Some(entry)
    }

    /// Unpins it. A place returned is to be wiped now.
    pub(super) fn end_read(&mut self, place: Place) -> Option<Place> {
        let slot = self.slot_mut(place)?;
        slot.readers = slot.readers.saturating_sub(1);
        if slot.readers > 0 || slot.state != State::Doomed {
            return None;
        }
        self.begin_wipe(place);
        Some(place)
    }

    /// Whether reads of this chunk are running.
    pub(super) fn is_read(&self, digest: Digest) -> bool {
        let Some(entry) = self.chunks.get(&digest) else { return false };
        let Some(segment) = self.segments.get(&entry.place.segment) else { return false };
        segment.slots[entry.place.slot as usize].readers > 0
    }

    /// Whether a removed chunk in this slot is still being read.
    pub(super) fn is_doomed(&self, place: Place) -> bool {
        let slot =
            self.segments.get(&place.segment).and_then(|it| it.slots.get(place.slot as usize));
        slot.is_some_and(|slot| slot.state == State::Doomed)
    }

    /// Makes a chunk unreadable. `None`: not held.
    pub(super) fn doom(&mut self, digest: Digest) -> Option<Doomed> {
        let entry = self.forget(digest)?;
        if self.slot_mut(entry.place)?.readers > 0 {
            self.set_state(entry.place, State::Doomed);
            return Some(Doomed::Later);
        }
        self.begin_wipe(entry.place);
        Some(Doomed::Wipe(entry.place))
    }

    /// Makes the chunk in this slot unreadable and never uses the slot again. The chunk, if it was still readable.
    pub(super) fn lose(&mut self, place: Place) -> Option<Digest> {
        match self.slot_mut(place)?.state {
            State::Live(digest) => {
                self.forget(digest);
                self.set_state(place, State::Quarantined);
                Some(digest)
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
        self.slot_mut(place).map_or(0, |slot| {
            slot.read_errors = slot.read_errors.saturating_add(1);
            slot.read_errors
        })
    }

    fn forget(&mut self, digest: Digest) -> Option<Entry> {
        let entry = self.chunks.remove(&digest)?;
        let segment = self.segments.get_mut(&entry.place.segment)?;
        segment.live -= 1;
        if let Some(class) = self.classes.get_mut(&segment.geometry.record_bytes) {
            class.order.remove(&digest);
        }
        Some(entry)
    }

    fn begin_wipe(&mut self, place: Place) {
        self.set_state(place, State::Wiping);
        self.add_leaving(place, 1);
    }

    /// The header of a slot was overwritten, or that failed.
    pub(super) fn end_wipe(&mut self, place: Place, wiped: bool) {
        self.add_leaving(place, -1);
        self.end_use(place, wiped);
    }

    /// A write into a slot failed; `clean` if nothing can have changed its header.
    pub(super) fn end_failed_write(&mut self, place: Place, clean: bool) {
        self.end_use(place, clean);
    }

    fn end_use(&mut self, place: Place, reusable: bool) {
        if !reusable {
            self.set_state(place, State::Quarantined);
            return;
        }
        self.set_state(place, State::Free);
        if let Some(slot) = self.slot_mut(place) {
            slot.read_errors = 0;
        }
        if let Some(class) = self.class_mut(place) {
            class.free.push(place);
        }
    }

    fn add_leaving(&mut self, place: Place, by: isize) {
        if let Some(class) = self.class_mut(place) {
            class.leaving = class.leaving.saturating_add_signed(by);
        }
    }

    fn class_mut(&mut self, place: Place) -> Option<&mut Class> {
        let record_bytes = self.segments.get(&place.segment)?.geometry.record_bytes;
        self.classes.get_mut(&record_bytes)
    }

    fn slot_mut(&mut self, place: Place) -> Option<&mut SlotInfo> {
        self.segments.get_mut(&place.segment)?.slots.get_mut(place.slot as usize)
    }

    fn set_state(&mut self, place: Place, state: State) {
        if let Some(slot) = self.slot_mut(place) {
            slot.state = state;
        }
    }

    /// Counts as used now, so that it is not proposed again at once.
    pub(super) fn touch_segment(&mut self, id: u64) {
        let tick = self.next_tick();
        if let Some(segment) = self.segments.get_mut(&id) {
            segment.last_used = tick;
        }
    }

    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }
}
