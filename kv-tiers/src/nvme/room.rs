//! Room for a record: a free slot, a new segment under the cap, or the place of something colder.

use std::{collections::HashMap, ffi::OsString, path::PathBuf, sync::Arc};

use kv_chunk::HEADER_BYTES;

use crate::{
    Completion, ErrorKind, EvictionGuard, TierError,
    nvme::{
        NvmeTier,
        backend::Ended,
        config::SEGMENTS_MAX,
        evict::{self, Dropped},
        files::{self, Made},
        index::{Place, Segment},
        persist,
        segment::{BLOCK, Geometry},
    },
};

/// A directory may grow by a block when a file is added.
const DIRECTORY_GROWTH_BYTES: u64 = BLOCK;
/// Segments taken for one record at most.
const SEGMENTS_TAKEN_MAX: u32 = 64;

/// Where a record can go.
#[derive(Debug)]
pub(super) enum Room {
    Now(Place),
    /// A slot is about to become free.
    Later,
    Never(TierError),
}

/// The cap, and what counts against it.
#[derive(Debug)]
pub(super) struct Space {
    directory: PathBuf,
    capacity_bytes: u64,
    segment_bytes: u64,
    pub(super) store_uuid: [u8; 16],
    used_bytes: u64,
    /// The last look at the directory failed: until one succeeds, all of the cap counts as used.
    is_unknown: bool,
    /// Of it what index files take beyond what those of so many slots need: they are of a larger store.
    index_excess_bytes: u64,
    /// Slots and segments that the index files tell of.
    told: (u64, u64),
    /// Slots about to become free that writes of this pass wait for, by class.
    promised: HashMap<u64, usize>,
    /// The last try to make a segment failed.
    is_growth_refused: bool,
}

impl Space {
    pub(super) fn new(
        directory: PathBuf,
        capacity_bytes: u64,
        segment_bytes: u64,
        store_uuid: [u8; 16],
    ) -> Self {
        Self {
            directory,
            capacity_bytes,
            segment_bytes,
            store_uuid,
            used_bytes: 0,
            is_unknown: false,
            index_excess_bytes: 0,
            told: (0, 0),
            promised: HashMap::new(),
            is_growth_refused: false,
        }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(super) fn is_over_cap(&self) -> bool {
        self.used_bytes > self.capacity_bytes
    }

    /// Whether index files of the right size would make the rest fit.
    pub(super) fn is_over_cap_by_index(&self) -> bool {
        self.is_over_cap() && self.used_bytes - self.index_excess_bytes <= self.capacity_bytes
    }

    /// Largest payload of which one fits, were there nothing else.
    pub(super) fn payload_bytes_max(&self) -> u64 {
        // A one-slot segment, its bookkeeping, the index files, the directory and the lock file.
        let overhead = 16 * BLOCK + persist::reserved_bytes(1, 1);
        self.capacity_bytes.saturating_sub(overhead + HEADER_BYTES as u64)
    }

    pub(super) fn begin_pass(&mut self) {
        self.promised.clear();
    }

    /// Counts again what is in the directory, the segments with what they may take.
    fn measure<'a>(
        &mut self,
        segments: impl Iterator<Item = &'a Segment>,
    ) -> Result<(), TierError> {
        let bound = |segment: &Segment| {
            let geometry = segment.geometry;
            (OsString::from(files::name_of(geometry.segment_id)), geometry.bound_bytes())
        };
        let bounds = segments.map(bound).collect();
        let index_bytes = persist::reserved_bytes(self.told.0, self.told.1);
        let measured = files::measure(&self.directory, &bounds)?;
        self.used_bytes = measured.bytes + measured.index_bytes.max(index_bytes);
        self.index_excess_bytes = measured.index_bytes.saturating_sub(index_bytes);
        Ok(())
    }

    /// Whether a record fits when all our segments are gone.
    fn could_hold<'a>(
        &self,
        record_bytes: u64,
        segments: impl Iterator<Item = &'a Segment>,
    ) -> bool {
        let ours = segments.map(|segment| segment.geometry.bound_bytes()).sum();
        let index_bytes = |(slots, segments)| persist::reserved_bytes(slots, segments);
        let foreign = self.used_bytes.saturating_sub(ours) - index_bytes(self.told);
        let smallest = Geometry { segment_id: 0, store_uuid: [0; 16], record_bytes, slots: 1 };
        let needed = smallest.bound_bytes() + index_bytes((1, 1));
        foreign + DIRECTORY_GROWTH_BYTES + needed <= self.capacity_bytes
    }

    /// The largest segment of this class that fits below the cap now.
    fn next_segment(&self, segment_id: u64, record_bytes: u64) -> Option<Geometry> {
        let free = self.capacity_bytes.checked_sub(self.used_bytes + DIRECTORY_GROWTH_BYTES)?;
        let geometry = |slots: u64| Geometry {
            segment_id,
            store_uuid: self.store_uuid,
            record_bytes,
            slots: u32::try_from(slots).unwrap_or(u32::MAX),
        };
        let (told, segments) = self.told;
        let index_bytes = |slots| {
            persist::reserved_bytes(told + slots, segments + 1)
                - persist::reserved_bytes(told, segments)
        };
        let fits = |slots: u64| geometry(slots).bound_bytes() + index_bytes(slots) <= free;
        let wanted = (self.segment_bytes.saturating_sub(BLOCK) / record_bytes).max(1);
        let mut slots = wanted.min(free / record_bytes);
        // The bookkeeping is a small part: few steps lead to what fits.
        while slots > 0 && !fits(slots) {
            slots -= (slots / 64).max(1);
        }
        (slots > 0).then(|| geometry(slots))
    }
}

impl NvmeTier {
    /// A place for a record of this size.
    pub(super) fn find_room(
        &mut self,
        record_bytes: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Room {
        if let Some(place) = self.index.take_free(record_bytes) {
            return Room::Now(place);
        }
        let mut refused = None;
        for _ in 0..SEGMENTS_TAKEN_MAX {
            match self.grow(record_bytes) {
                Ok(true) => match self.index.take_free(record_bytes) {
                    Some(place) => return Room::Now(place),
                    None => break,
                },
                Ok(false) => {}
                // Once a full file system is helped by giving up something of ours; others may fill it again.
                Err(_) if refused.is_some() => break,
                Err(error) => refused = Some(error),
            }
            if self.is_promised(record_bytes) {
                return Room::Later;
            }
            let mut dropped = Dropped::default();
            let took = self.make_room(record_bytes, guard, &mut dropped);
            self.settle_dropped(dropped, completions);
            match took {
                Took::Segment => {}
                Took::Slot if self.is_promised(record_bytes) => return Room::Later,
                Took::Slot | Took::Nothing => break,
            }
        }
        Room::Never(refused.unwrap_or_else(|| self.no_room(record_bytes)))
    }

    /// Why there is no room, for whoever reads it.
    fn no_room(&self, wanted_bytes: u64) -> TierError {
        let capacity_bytes = self.config.capacity_bytes;
        let segments = self.index.segment_count() as u64;
        let has_own = self.index.class(wanted_bytes).is_some();
        if segments > 0 && !has_own && self.space.could_hold(wanted_bytes, self.index.segments()) {
            return TierError::AllLeased { wanted_bytes, capacity_bytes, segments };
        }
        TierError::NoSpace { wanted_bytes, capacity_bytes }
    }

    /// Whether a slot of this class will become free that no earlier write waits for; then it is promised.
    fn is_promised(&mut self, record_bytes: u64) -> bool {
        let leaving = self.index.class(record_bytes).map_or(0, |class| class.leaving);
        let promised = self.space.promised.entry(record_bytes).or_default();
        let available = leaving > *promised;
        *promised += usize::from(available);
        available
    }

    pub(super) fn make_room(
        &mut self,
        record_bytes: u64,
        guard: &dyn EvictionGuard,
        dropped: &mut Dropped,
    ) -> Took {
        // A segment that nobody used since our own coldest chunk was used is worth less than that chunk.
        let own = evict::coldest_tick(&mut self.index, record_bytes);
        let index = &mut self.index;
        let mut taken =
            own.and_then(|_| evict::take_coldest_segment(index, record_bytes, own, guard, dropped));
        if taken.is_none() {
            if evict::drop_coldest_chunk(index, record_bytes, guard, dropped) {
                return Took::Slot;
            }
            // What is not ours may leave too little: then nothing is given up for nothing.
            if !self.space.could_hold(record_bytes, index.segments()) {
                return Took::Nothing;
            }
            taken = evict::take_coldest_segment(index, record_bytes, None, guard, dropped);
        }
        let Some(segment) = taken else { return Took::Nothing };
        self.discard(segment);
        Took::Segment
    }

    /// Gives the space of a segment back; its chunks are no longer indexed.
    pub(super) fn discard(&mut self, segment: Segment) {
        self.remove_file(segment);
        self.measure_space();
    }

    /// The same, before others: the space is to be measured after the last.
    pub(super) fn remove_file(&mut self, segment: Segment) {
        if let Some(backend) = &mut self.backend {
            segment.files().for_each(|file| backend.remove_file(file));
        }
        if let Err(error) = files::remove(segment.file.path()) {
            tracing::warn!(tier = self.config.name, %error, "a segment file stays and counts");
            self.index.reserve_ids_to(segment.geometry.segment_id);
        }
    }

    pub(super) fn settle_dropped(&mut self, dropped: Dropped, completions: &mut Vec<Completion>) {
        self.stats.evictions += dropped.digests.len() as u64;
        completions
            .extend(dropped.digests.into_iter().map(|digest| Completion::Evicted { digest }));
        for place in dropped.wipes {
            self.start_wipe(place);
        }
    }

    pub(super) fn measure_space(&mut self) {
        self.space.told = (self.index.slots(), self.index.segment_count() as u64);
        let measured = self.space.measure(self.index.segments());
        let was_unknown = std::mem::replace(&mut self.space.is_unknown, measured.is_err());
        if let Err(error) = measured {
            if !was_unknown {
                // Said once, until it works again: every write asks.
                tracing::warn!(tier = self.config.name, %error, "the directory cannot be measured");
            }
            // Nothing is known about the space: nothing may be taken.
            self.space.used_bytes = self.space.used_bytes.max(self.config.capacity_bytes);
        }
    }

    /// Whether a segment more fits below the cap, from what is known without a look. A look that failed is repeated.
    pub(super) fn may_grow(&mut self, record_bytes: u64) -> bool {
        if self.space.is_unknown {
            self.measure_space();
        }
        let id = self.index.next_segment_id();
        let may = self.index.segment_count() < SEGMENTS_MAX;
        may && self.space.next_segment(id, record_bytes).is_some()
    }

    /// Adds a segment of this class if one fits below the cap and above the floor. False: none fits.
    fn grow(&mut self, record_bytes: u64) -> Result<bool, TierError> {
        let id = self.index.next_segment_id();
        // A quick look first: measuring reads the directory.
        if !self.may_grow(record_bytes) {
            return Ok(false);
        }
        self.measure_space();
        let Some(geometry) = self.space.next_segment(id, record_bytes) else { return Ok(false) };
        let floor = self.config.min_free_bytes;
        let available = || files::available_bytes(&self.config.directory);
        if floor > 0 && available().is_some_and(|it| it < floor + geometry.bound_bytes()) {
            return Ok(false);
        }
        let mut made = self.make_segment(&geometry)?;
        if let Some(errno) = made.sparse {
            self.note_fallback("reserved space", &format!("fallocate: {errno}; files are sparse"));
        }
        if self.stats.io_mode.registered_files
            && let Some(backend) = &mut self.backend
        {
            backend.add_file(&mut made.file);
        }
        self.index.add_segment(made.file, geometry);
        self.measure_space();
        Ok(true)
    }

    fn make_segment(&mut self, geometry: &Geometry) -> Result<Made, TierError> {
        let directory = &self.config.directory;
        let mut made = files::make(directory, geometry, self.stats.io_mode.direct);
        if let Err(TierError::Io { errno: libc::EINVAL, context, .. }) = &made
            && self.stats.io_mode.direct
        {
            let cause = context.to_string();
            self.use_page_cache(&cause);
            made = files::make(&self.config.directory, geometry, false);
        }
        let failed = made.is_err();
        if let Err(error) = &made
            && !self.space.is_growth_refused
        {
            // Said once, until it works again: every write asks.
            tracing::warn!(tier = self.config.name, %error, "no new segment");
        }
        self.space.is_growth_refused = failed;
        made
    }

    /// Says once what is not used, and why.
    pub(super) fn note_fallback(&mut self, what: &str, cause: &str) {
        let line = format!("{what} not used: {cause}");
        if !self.stats.fallbacks.contains(&line) {
            tracing::warn!(tier = self.config.name, "{line}");
            self.stats.fallbacks.push(line);
        }
    }

    /// After a direct request that was refused at run time. False if the file of this transfer cannot be used otherwise.
    pub(super) fn fall_back_to_buffered(&mut self, ended: &Ended) -> bool {
        let path = ended.transfer.file.path();
        if self.stats.io_mode.direct {
            self.use_page_cache(&path.display().to_string());
        }
        self.index.segments().any(|segment| segment.file.path() == path && !segment.file.direct())
    }

    /// All files go through the page cache from now on.
    fn use_page_cache(&mut self, cause: &str) {
        self.stats.io_mode.direct = false;
        self.stats.io_mode.registered_files = false;
        self.note_fallback("O_DIRECT", &format!("EINVAL at run time: {cause}"));
        for segment in self.index.segments_mut() {
            match segment.file.reopen_buffered() {
                Ok(file) => segment.replace_file(Arc::new(file)),
                Err(error) => tracing::warn!(%error, "a segment stays direct"),
            }
        }
    }
}

/// What making room brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Took {
    Slot,
    Segment,
    Nothing,
}

/// Errors that the file system's fullness explains.
pub(super) fn is_full(error: &TierError) -> bool {
    error.kind() == ErrorKind::NoSpace
}
