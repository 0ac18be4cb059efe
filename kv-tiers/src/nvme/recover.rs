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
        index::Place,
        open::wait_for,
        segment::{BLOCK_LEN, Page},
        transfer::{Direction, Memory, Run, Transfer},
    },
};

/// Headers read at a time.
const HEADERS_IN_FLIGHT: usize = 256;

impl NvmeTier {
    /// Fills the index, removes what is beyond use, and shrinks to the cap.
    pub(super) fn recover(&mut self) -> Result<(), TierError> {
        self.find_segments()?;
        let torn = self.scan_slots()?;
        self.index.settle_recovery();
        if self.config.look_only {
            self.measure_space();
        } else {
            self.shrink_to_cap();
        }
        for place in torn {
            if self.index.segment(place.segment).is_some() {
                self.start_wipe(place);
            }
        }
        self.stats.recovered_chunks = self.index.len() as u64;
        tracing::info!(
            tier = self.config.name,
            chunks = self.stats.recovered_chunks,
            used_bytes = self.space.used_bytes(),
            "store opened"
        );
        Ok(())
    }

    fn find_segments(&mut self) -> Result<(), TierError> {
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
                    self.index.add_segment(file, geometry);
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
        if let Some(uuid) = uuid {
            self.space.store_uuid = uuid;
        }
        Ok(())
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

    /// Reads the header of every slot. Returns the slots to wipe.
    fn scan_slots(&mut self) -> Result<Vec<Place>, TierError> {
        let slots_of = |segment: &crate::nvme::index::Segment| {
            let geometry = segment.geometry;
            (0..geometry.slots).map(move |slot| Place { segment: geometry.segment_id, slot })
        };
        let places: Vec<Place> = self.index.segments().flat_map(slots_of).collect();
        let mut torn = Vec::new();
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
                    self.index.recover_unusable(place);
                } else {
                    self.recover_slot(place, &page, &mut torn);
                }
                pages.push(page);
            }
        }
        Ok(torn)
    }

    fn start_header_read(&mut self, place: Place, key: u64, page: Box<Page>) {
        let Some(segment) = self.index.segment(place.segment) else { return };
        let file_offset = segment.geometry.slot_offset(place.slot);
        let run = Run { file_offset, memory_offset: 0, bytes: BLOCK_LEN };
        let file = Arc::clone(&segment.file);
        let read = Transfer::one(key, Direction::Read, file, Memory::Page(page), run);
        if let Some(backend) = &mut self.backend {
            backend.start(read);
        }
    }

    fn recover_slot(&mut self, place: Place, page: &Page, torn: &mut Vec<Place>) {
        if page.0.iter().all(|&byte| byte == 0) {
            return;
        }
        let record_bytes =
            self.index.segment(place.segment).map_or(0, |segment| segment.geometry.record_bytes);
        match ChunkHeader::parse(&page.0) {
            Ok(header) if class_of(header.payload_bytes()) == record_bytes => {
                let held =
                    Held { payload_bytes: header.payload_bytes(), write_id: header.write_id() };
                // Of two copies, which a kill between a removal and its wipe leaves, one is enough.
                if self.index.recover(place, header.digest(), held) {
                    return;
                }
            }
            Err(HeaderError::Version { .. }) => {
                self.detail.newer_chunks += 1;
                return self.index.recover_unusable(place);
            }
            _ => {}
        }
        self.detail.torn_slots += 1;
        if self.config.look_only {
            return self.index.recover_unusable(place);
        }
        self.index.recover_torn(place);
        torn.push(place);
    }

    /// A cap that was lowered holds at once: whole segments go, empty and old ones first.
    fn shrink_to_cap(&mut self) {
        self.measure_space();
        let rank = |segment: &crate::nvme::index::Segment| {
            (segment.live > 0, segment.last_used, segment.geometry.segment_id)
        };
        while self.space.is_over_cap() {
            let Some((.., id)) = self.index.segments().map(rank).min() else { break };
            let Some(segment) = self.index.remove_segment(id) else { break };
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
