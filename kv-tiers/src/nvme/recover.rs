//! Rebuilds the index at open from the headers on the medium.

use std::{path::PathBuf, sync::Arc};

use kv_chunk::{ChunkHeader, HeaderError};

use crate::{
    Held, TierError,
    nvme::{
        Finding, FindingKind, NvmeTier,
        backend::Ended,
        class_of,
        files::{self, Found},
        index::{Place, Scope, Segment, Settled},
        open::wait_for,
        persist::Persist,
        segment::{BLOCK_LEN, Page},
        slots::{Slot, State},
        transfer::{Direction, Memory, Run, Transfer},
        warm::{self, Loaded},
    },
};

/// Headers read at a time.
const HEADERS_IN_FLIGHT: usize = 256;
/// When a chunk was last used of which only its header tells.
const FOUND_AT: u64 = 1;

impl NvmeTier {
    /// Fills the index, removes what is beyond use, and shrinks to the cap.
    pub(super) fn recover(&mut self) -> Result<(), TierError> {
        let mut store_uuid = self.find_segments()?;
        let loaded = warm::load(&self.config.directory, &mut store_uuid, &mut self.index);
        self.space.store_uuid = store_uuid.unwrap_or(self.space.store_uuid);
        self.report(&loaded);
        let reads_all = self.config.look_only || self.config.read_all_headers;
        let scope = if reads_all { Scope::All } else { Scope::Unknown };
        if !self.config.look_only {
            self.finish_giving_up(&loaded);
        }
        let scanned = self.index.slots_to_scan(scope);
        self.detail.scanned_slots = scanned.len() as u64;
        self.scan_slots(&scanned)?;
        let Settled { wipes, copies } = self.index.settle_recovery();
        self.detail.torn_slots += copies;
        self.begin_persisting(loaded, &scanned, &wipes);
        if self.config.look_only {
            self.measure_space();
        } else {
            self.shrink_to_cap();
            for place in wipes {
                if self.index.segment(place.row).is_some() {
                    self.start_wipe(place);
                }
            }
            let rows: Vec<u32> = self.index.rows().collect();
            rows.into_iter().for_each(|row| self.note_removed(row));
            self.write_journal();
        }
        self.stats.recovered_chunks = self.index.len() as u64;
        tracing::info!(
            tier = self.config.name,
            recovered_chunks = self.stats.recovered_chunks,
            scanned_slots = self.detail.scanned_slots,
            used_bytes = self.space.used_bytes(),
            "store opened"
        );
        Ok(())
    }

    fn report(&mut self, loaded: &Loaded) {
        for (path, version) in &loaded.left_alone {
            self.leave_alone(path, &format!("index format version {version}, this reader knows 1"));
        }
        for (path, what) in &loaded.damaged {
            self.find(path.clone(), FindingKind::Damaged, what);
        }
        for path in &loaded.temporaries {
            self.find(path.clone(), FindingKind::Leftover, "an interrupted run left it");
        }
        if let Some(trouble) = &loaded.trouble {
            let tier = &self.config.name;
            tracing::warn!(tier, trouble, "index files are not whole: headers are read instead");
        }
    }

    /// Removes the files of segments that were given up when the process died.
    fn finish_giving_up(&mut self, loaded: &Loaded) {
        for row in &loaded.given_up {
            if let Some(segment) = self.index.remove_segment(*row) {
                self.discard(segment);
            }
        }
    }

    /// From here on the index files follow the index.
    fn begin_persisting(&mut self, loaded: Loaded, scanned: &[Place], wipes: &[Place]) {
        let is_told = |segment: &Segment| segment.told == segment.geometry.slots;
        let all_told = self.index.segments().all(is_told);
        let (directory, uuid) = (&self.config.directory, self.space.store_uuid);
        if self.config.look_only {
            self.persist = Some(Persist::frozen(directory, uuid, loaded, &self.index));
            return;
        }
        let mut persist = Persist::new(directory, uuid, loaded, &self.index);
        if all_told && persist.is_writing() && !self.config.read_all_headers {
            scanned.iter().chain(wipes).for_each(|place| self.index.note(*place));
            persist.flush(&mut self.index, &self.wake);
        } else {
            persist.save(&mut self.index);
        }
        self.persist = Some(persist);
    }

    /// Finds the segments; the number of their store.
    fn find_segments(&mut self) -> Result<Option<[u8; 16]>, TierError> {
        let mut uuid = None;
        for found in files::look(&self.config.directory, self.stats.io_mode.direct)? {
            match found {
                Found::Segment(mut file, geometry)
                    if uuid.is_none_or(|known| known == geometry.store_uuid) =>
                {
                    uuid = Some(geometry.store_uuid);
                    if let Some(backend) = &mut self.backend {
                        backend.add_file(&mut file);
                    }
                    self.index.recover_segment(file, geometry);
                }
                Found::Segment(file, _) => self.leave_alone(file.path(), "it is of another store"),
                Found::LeftAlone(path, why) => self.leave_alone(&path, &why),
                Found::Damaged(path, what) => {
                    if !self.config.look_only {
                        tracing::warn!(path = %path.display(), what, "a damaged segment is removed");
                        self.detail.dropped_segments += 1;
                        files::remove(&path)?;
                    }
                    self.find(path, FindingKind::Damaged, what);
                }
                Found::Stale(path) => {
                    if !self.config.look_only {
                        files::remove(&path)?;
                    }
                    self.find(path, FindingKind::Leftover, "an interrupted run left it");
                }
            }
        }
        Ok(uuid)
    }

    fn leave_alone(&mut self, path: &std::path::Path, why: &str) {
        tracing::warn!(path = %path.display(), why, "a file is left alone; it counts against the cap");
        self.detail.left_alone_files += 1;
        self.index.reserve_ids_to(files::id_in(path).unwrap_or(0));
        self.find(path.to_owned(), FindingKind::LeftAlone, why);
    }

    fn find(&mut self, path: PathBuf, kind: FindingKind, why: &str) {
        self.findings.push(Finding { path, kind, why: why.to_owned() });
    }

    /// Reads the headers of these slots.
    fn scan_slots(&mut self, places: &[Place]) -> Result<(), TierError> {
        let mut pages: Vec<Box<Page>> = Vec::new();
        let (mut next, mut running) = (0, 0);
        let mut ended: Vec<Ended> = Vec::new();
        while next < places.len() || running > 0 {
            while running < HEADERS_IN_FLIGHT && next < places.len() {
                let page = pages.pop().unwrap_or_else(Page::zeroed);
                self.start_header_read(places[next], next as u64, page);
                next += 1;
                running += 1;
            }
            let Some(backend) = self.backend.as_deref_mut() else { break };
            wait_for(&self.config, backend, &self.wake, &mut ended)?;
            for ended in ended.drain(..) {
                running -= 1;
                let Ok(at) = usize::try_from(ended.transfer.key) else { continue };
                let place = places[at];
                let Memory::Page(page) = ended.transfer.memory else { continue };
                if let Some(failure) = ended.failure {
                    tracing::warn!(?failure, path = %ended.transfer.file.path().display(), "a slot cannot be read");
                    self.index.recover_state(place, State::Quarantined);
                } else {
                    self.recover_slot(place, &page);
                }
                pages.push(page);
            }
        }
        Ok(())
    }

    fn start_header_read(&mut self, place: Place, key: u64, page: Box<Page>) {
        let Some(segment) = self.index.segment(place.row) else { return };
        let file_offset = segment.geometry.slot_offset(place.slot);
        let run = Run { file_offset, memory_offset: 0, bytes: BLOCK_LEN };
        let file = Arc::clone(&segment.file);
        let read = Transfer::one(key, Direction::Read, file, Memory::Page(page), run);
        if let Some(backend) = &mut self.backend {
            backend.start(read);
        }
    }

    fn recover_slot(&mut self, place: Place, page: &Page) {
        if page.0.iter().all(|&byte| byte == 0) {
            return self.index.recover_state(place, State::Free);
        }
        let record_bytes =
            self.index.segment(place.row).map_or(0, |segment| segment.geometry.record_bytes);
        match ChunkHeader::parse(&page.0) {
            Ok(header) if class_of(header.payload_bytes()) == record_bytes => {
                let held =
                    Held { payload_bytes: header.payload_bytes(), write_id: header.write_id() };
                self.index.recover(place, Slot::live(header.digest(), held, FOUND_AT));
                return;
            }
            Err(HeaderError::Version { .. }) => {
                self.detail.newer_chunks += 1;
                return self.index.recover_state(place, State::Quarantined);
            }
            _ => {}
        }
        self.detail.torn_slots += 1;
        let state = if self.config.look_only { State::Quarantined } else { State::Wiping };
        self.index.recover_state(place, state);
    }

    /// A cap that was lowered holds at once: whole segments go, empty and old ones first.
    fn shrink_to_cap(&mut self) {
        self.measure_space();
        let rank = |segment: &Segment| (segment.warmth(), segment.geometry.segment_id);
        let mut may_rewrite = true;
        while self.space.is_over_cap() {
            if may_rewrite && self.space.is_over_cap_by_index() {
                // Once: files of a later version count, too, and stay.
                may_rewrite = false;
                if let Some(persist) = &mut self.persist {
                    persist.save(&mut self.index);
                }
                self.measure_space();
                continue;
            }
            let Some((_, id)) = self.index.segments().map(rank).min() else { break };
            let row = self.index.row_of(id);
            let Some(segment) = row.and_then(|row| self.index.remove_segment(row)) else { break };
            self.detail.dropped_segments += 1;
            self.discard(segment);
        }
        if self.space.is_over_cap() {
            tracing::warn!(
                tier = self.config.name,
                used_bytes = self.space.used_bytes(),
                capacity_bytes = self.config.capacity_bytes,
                "files that are not ours fill the cap: nothing can be written"
            );
        }
    }
}
