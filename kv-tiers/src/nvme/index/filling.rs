//! Filling the index at open: segments, then slots, then all that follows from them.

use super::Index;
use crate::nvme::{
    class_of,
    files::SegmentFile,
    segment::Geometry,
    slots::{Place, Segment, Slot, State},
};

/// Which headers are read at open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::nvme) enum Scope {
    /// Of segments that the index files do not tell of, and of slots in doubt.
    Unknown,
    All,
}

/// What is left to do after filling.
#[derive(Debug)]
pub(in crate::nvme) struct Settled {
    /// Slots to wipe.
    pub(in crate::nvme) wipes: Vec<Place>,
    /// How many of them hold a chunk that another slot holds too.
    pub(in crate::nvme) copies: u64,
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

    /// Builds everything else from the slots.
    pub(in crate::nvme) fn settle_recovery(&mut self) -> Settled {
        self.classes.clear();
        let slots = self.rows.values().flat_map(|&row| {
            let slots = self.slab.get(row).map_or(&[][..], |segment| &segment.slots);
            (0..).zip(slots).map(move |(slot, state)| (Place { row, slot }, state.state))
        });
        let in_state = |wanted| slots.clone().filter(move |(_, state)| *state == wanted);
        let mut wipes: Vec<Place> = in_state(State::Wiping).map(|(place, _)| place).collect();
        let live = in_state(State::Live).map(|(place, _)| place);
        let copies = self.chunks.fill(&self.slab, live);
        let copies_count = copies.len() as u64;
        wipes.extend(copies);
        for &place in &wipes {
            if let Some(known) = self.slab.slot_mut(place) {
                *known = Slot::in_state(State::Wiping);
            }
        }
        let mut order = Vec::new();
        let rows: Vec<u32> = self.rows.values().copied().collect();
        for &row in &rows {
            self.slab.get_mut(row).map(Segment::recount);
            self.enlist(row);
            let Some(segment) = self.slab.get(row) else { continue };
            let live = (0..).zip(&segment.slots).filter(|(_, slot)| slot.state == State::Live);
            order.extend(
                live.map(|(number, slot)| {
                    (slot.queued_at, slot.queue, Place { row, slot: number })
                }),
            );
        }
        order.sort_by_key(|(queued_at, ..)| *queued_at);
        for (queued_at, queue, place) in order {
            if let Some((_, class)) = self.parts(place.row) {
                class.queues.restore(place, queue, queued_at);
            }
        }
        for place in &wipes {
            if let Some((_, class)) = self.parts(place.row) {
                class.leaving += 1;
            }
        }
        Settled { wipes, copies: copies_count }
    }
}
