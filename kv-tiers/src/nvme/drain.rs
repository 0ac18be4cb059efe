//! Makes room ahead of writes, a little in each poll: free slots for the sizes that are written, and the floor of free
//! space that the file system shall keep.

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

/// What is to be made room for.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// Record sizes whose free slots ran below the high watermark.
    classes: Vec<u64>,
    /// Something was written since the file system's free space was looked at.
    is_floor_due: bool,
}

impl Drain {
    pub(super) fn is_idle(&self) -> bool {
        self.classes.is_empty() && !self.is_floor_due
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
        let classes = std::mem::take(&mut self.drain.classes);
        let still = classes.into_iter().filter(|&it| self.drain_class(it, guard, completions));
        let still: Vec<u64> = still.collect();
        self.drain.classes = still;
        is_below_floor || !self.drain.classes.is_empty()
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
