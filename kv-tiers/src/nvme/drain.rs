//! Makes room ahead of writes, a little in each poll: free slots for the sizes that are written, and the floor of free
//! space that the file system shall keep. Gives the space of segments back whose chunks were all removed.

use std::collections::BTreeSet;

use crate::{
    Completion, EvictionGuard,
    nvme::{
        NvmeTier,
        evict::{self, Dropped},
        files,
        room::Took,
    },
};

/// Chunks dropped in one poll ahead of writes.
const CHUNKS_PER_POLL: usize = 8;
/// Sizes that are drained for at a time.
const CLASSES_MAX: usize = 8;

/// Segments given back in one poll.
const SEGMENTS_PER_POLL: usize = 8;

/// What is to be made room for, and what is to be given back.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// Record sizes whose free slots ran below the high watermark.
    classes: Vec<u64>,
    /// Something was written since the file system's free space was looked at.
    is_floor_due: bool,
    /// Numbers of segments whose last chunk was removed. Eviction is no reason: a write follows, and takes the slot.
    emptied: BTreeSet<u64>,
}

impl Drain {
    pub(super) fn is_idle(&self) -> bool {
        self.classes.is_empty() && !self.is_floor_due && self.emptied.is_empty()
    }
}

impl NvmeTier {
    /// A slot of this size was taken: are there enough left?
    pub(super) fn note_slot_taken(&mut self, record_bytes: u64) {
        self.drain.is_floor_due = self.config.min_free_bytes > 0;
        let drained = &self.drain.classes;
        if drained.len() < CLASSES_MAX
            && !drained.contains(&record_bytes)
            && self.free_slots(record_bytes)
                < self.free_wanted(record_bytes, self.config.high_watermark_permille)
        {
            self.drain.classes.push(record_bytes);
        }
    }

    /// A chunk of this segment was removed, or the store was opened: does it hold nothing any more?
    pub(super) fn note_removed(&mut self, row: u32) {
        if let Some(segment) = self.index.segment(row)
            && segment.is_empty()
        {
            self.drain.emptied.insert(segment.geometry.segment_id);
        }
    }

    /// Gives the space of emptied segments back to the file system. True: there is more to do.
    fn give_back(&mut self) -> bool {
        let mut given = 0;
        for id in std::mem::take(&mut self.drain.emptied) {
            let Some(row) = self.index.row_of(id) else { continue };
            let Some(segment) = self.index.segment(row).filter(|it| it.is_empty()) else {
                continue;
            };
            // The end of a wipe or a read wakes us. What is being written will not be empty.
            if !segment.is_idle() || given == SEGMENTS_PER_POLL {
                self.drain.emptied.insert(id);
            } else if let Some(segment) = self.index.remove_segment(row) {
                given += 1;
                self.remove_file(segment);
            }
        }
        if given > 0 {
            self.measure_space();
        }
        given == SEGMENTS_PER_POLL && !self.drain.emptied.is_empty()
    }

    /// Slots that are free or about to be.
    fn free_slots(&self, record_bytes: u64) -> usize {
        self.index.class(record_bytes).map_or(0, |class| class.free + class.leaving)
    }

    /// Slots of a size to be free below this watermark. A small store has none to spare.
    fn free_wanted(&self, record_bytes: u64, used_permille: u32) -> usize {
        let slots = self.index.class(record_bytes).map_or(0, |class| class.slots);
        let free_permille = 1000 - used_permille.min(1000) as usize;
        slots * free_permille / 1000
    }

    /// Drops a few chunks where watermarks or the floor ask for it. True: there is more to do.
    pub(super) fn drain(
        &mut self,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> bool {
        let is_below_floor =
            std::mem::take(&mut self.drain.is_floor_due) && self.keep_floor(guard, completions);
        self.drain.is_floor_due |= is_below_floor;
        let goes_on = self.give_back();
        let classes = std::mem::take(&mut self.drain.classes);
        let still = classes.into_iter().filter(|&it| self.drain_class(it, guard, completions));
        let still: Vec<u64> = still.collect();
        self.drain.classes = still;
        is_below_floor || goes_on || !self.drain.classes.is_empty()
    }

    /// True: there is more to do.
    fn drain_class(
        &mut self,
        record_bytes: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> bool {
        let wanted = self.free_wanted(record_bytes, self.config.low_watermark_permille);
        for _ in 0..CHUNKS_PER_POLL {
            if self.free_slots(record_bytes) >= wanted || self.may_grow(record_bytes) {
                return false;
            }
            let mut dropped = Dropped::default();
            // Colder segments of other sizes go first, as for a write.
            let took = self.make_room(record_bytes, guard, &mut dropped);
            self.settle_dropped(dropped, completions);
            if took == Took::Nothing {
                return false;
            }
        }
        true
    }

    /// Gives up the coldest segment if the file system has less free space than it shall. True: it did, look again.
    fn keep_floor(&mut self, guard: &dyn EvictionGuard, completions: &mut Vec<Completion>) -> bool {
        let available = files::available_bytes(&self.config.directory);
        if available.is_none_or(|bytes| bytes >= self.config.min_free_bytes) {
            return false;
        }
        let mut dropped = Dropped::default();
        let taken = evict::take_coldest_segment(&mut self.index, 0, None, guard, &mut dropped);
        self.settle_dropped(dropped, completions);
        let Some(segment) = taken else { return false };
        self.discard(segment);
        true
    }
}
