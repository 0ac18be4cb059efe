//! Filling the index at open: segments, then slots, then all that follows from them.

use std::collections::hash_map;

use super::{Chunks, Index};
use crate::nvme::{
    class_of,
    files::SegmentFile,
    segment::Geometry,
    slots::{Place, Segment, Slab, Slot, State},
};

/// Which headers are read at open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::nvme) enum Scope {
    /// Of segments that the index files do not tell of, and of slots in doubt.
    Unknown,
    All,
}

impl Index {
    /// Adds a segment of whose slots nothing is known.
    pub(in crate::nvme) fn recover_segment(
        &mut self,
        file: SegmentFile,
        geometry: Geometry,
    ) -> u32 {
        let row = self.slab.add(Segment::new(file, geometry));
        self.rows.insert(geometry.segment_id, row);
        self.slots += u64::from(geometry.slots);
        row
    }

    /// Says what a slot holds. What cannot be is in doubt.
    pub(in crate::nvme) fn recover(&mut self, place: Place, slot: Slot) {
        self.tick = self.tick.max(slot.used_at).max(slot.queued_at);
        let Some(segment) = self.slab.get_mut(place.row) else { return };
        let fits = class_of(slot.held().payload_bytes) == segment.geometry.record_bytes;
        let Some(known) = segment.slots.get_mut(place.slot as usize) else { return };
        if slot.state == State::Live && known.state == State::Live {
            // A header that is as expected: more is known of it.
            if slot.digest == known.digest && slot.held() == known.held() && slot.used_at <= 1 {
                return;
            }
        }
        *known = slot;
        if slot.state == State::Live && !fits {
            *known = Slot::in_state(State::Quarantined);
        }
    }

    pub(in crate::nvme) fn recover_state(&mut self, place: Place, state: State) {
        self.recover(place, Slot::in_state(state));
    }

    /// Notes that index files tell of so many slots of a segment; they are free where nothing else is said.
    pub(in crate::nvme) fn recover_told(&mut self, row: u32, slots: u32) {
        if let Some(segment) = self.slab.get_mut(row) {
            segment.told = segment.told.saturating_add(slots).min(segment.geometry.slots);
        }
    }

    /// Forgets what was said of a segment.
    pub(in crate::nvme) fn recover_unknown(&mut self, row: u32) {
        if let Some(segment) = self.slab.get_mut(row) {
            segment.told = 0;
            segment.slots.fill(Slot::FREE);
        }
    }

    /// The slots whose headers are to be read. What is to be wiped counts as wiped.
    pub(in crate::nvme) fn slots_to_scan(&self, scope: Scope) -> Vec<Place> {
        let mut places = Vec::new();
        for &row in self.rows.values() {
            let Some(segment) = self.slab.get(row) else { continue };
            let is_known = segment.told == segment.geometry.slots;
            let wanted = |slot: &Slot| match scope {
                Scope::All => slot.state != State::Wiping,
                Scope::Unknown => !is_known || slot.state == State::Quarantined,
            };
            let slots = (0..).zip(&segment.slots).filter(|(_, slot)| wanted(slot));
            places.extend(slots.map(|(slot, _)| Place { row, slot }));
        }
        places
    }

    /// Builds everything else from the slots. Returns the slots to wipe.
    pub(in crate::nvme) fn settle_recovery(&mut self) -> Vec<Place> {
        self.classes.clear();
        self.chunks.clear();
        self.chunks.reserve(usize::try_from(self.slots).unwrap_or(0));
        let mut wipes = Vec::new();
        let mut order = Vec::new();
        for &row in self.rows.values() {
            let slots = self.slab.get(row).map_or(0, |segment| segment.geometry.slots);
            for place in (0..slots).map(|slot| Place { row, slot }) {
                match self.slab.slot(place).map(|slot| slot.state) {
                    Some(State::Live) => wipes.extend(unify(&mut self.chunks, &self.slab, place)),
                    Some(State::Wiping) => wipes.push(place),
                    _ => {}
                }
            }
        }
        for &place in &wipes {
            let slot = Slot::in_state(State::Wiping);
            if let Some(known) = self.slab.slot_mut(place) {
                *known = slot;
            }
        }
        let rows: Vec<u32> = self.rows.values().copied().collect();
        for &row in &rows {
            self.slab.get_mut(row).map(Segment::recount);
            self.enlist(row);
            let Some(segment) = self.slab.get(row) else { continue };
            let live = (0..).zip(&segment.slots).filter(|(_, slot)| slot.state == State::Live);
            order.extend(live.map(|(number, slot)| (slot.queued_at, Place { row, slot: number })));
        }
        order.sort_by_key(|(queued_at, _)| *queued_at);
        for (_, place) in order {
            if let Some((slab, class)) = self.parts(place.row) {
                class.queues.restore(slab, place);
            }
        }
        for place in &wipes {
            if let Some((_, class)) = self.parts(place.row) {
                class.leaving += 1;
            }
        }
        wipes
    }
}

/// Enters a chunk. Of two copies, which a kill between a removal and its wipe leaves, the younger stays: the other.
fn unify(chunks: &mut Chunks, slab: &Slab, place: Place) -> Option<Place> {
    let slot = slab.slot(place)?;
    match chunks.entry(slot.digest) {
        hash_map::Entry::Vacant(vacant) => {
            vacant.insert(place);
            None
        }
        hash_map::Entry::Occupied(mut occupied) => {
            let known = slab.slot(*occupied.get()).map_or(0, |known| known.used_at);
            if slot.used_at <= known {
                return Some(place);
            }
            Some(occupied.insert(place))
        }
    }
}
