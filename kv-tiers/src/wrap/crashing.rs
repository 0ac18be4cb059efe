//! A persistent tier in memory that can crash at any point.

use std::{collections::BTreeMap, io, os::fd::BorrowedFd, path::PathBuf, sync::Arc};

use kv_chunk::{ChunkHeader, Digest, HEADER_BYTES};

use super::image::{CrashImage, Dead};
use crate::{
    Capabilities, Completion, EvictionGuard, Held, IoContext, ListCursor, Located, MemoryConfig,
    MemoryTier, Op, OpId, Record, Rejected, Tier, TierError, TierStats, record_bytes,
};

/// A [`MemoryTier`] whose records also go to a [`CrashImage`], from which it can be opened again.
///
/// What *durable* means for a tier: **a write that has completed survives the death of the process**
/// ([`Crash::Process`](crate::Crash::Process)), and the loss of power ([`Crash::Power`](crate::Crash::Power)) only if
/// it was flushed. What was not flushed may be found whole, torn, or not at all, in any order; whatever is found is
/// checked, and a chunk that does not verify is not there. A removal that was not flushed may come undone. No crash
/// yields wrong bytes.
///
/// Each record has a place of its own on the medium. When the medium stops (see
/// [`stop_after_grains`](CrashImage::stop_after_grains)), every op from then on fails with EIO.
#[derive(Debug)]
pub struct Crashing {
    live: MemoryTier,
    image: CrashImage,
    flush: FlushPolicy,
    places: BTreeMap<Digest, u64>,
    free: Vec<u64>,
    next_place: u64,
    place_bytes: u64,
    records: BTreeMap<OpId, Arc<Record>>,
    recovered_chunks: u64,
    scratch: Vec<Completion>,
}

/// When a [`Crashing`] tier flushes its medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlushPolicy {
    /// Before each chunk becomes readable, and after each removal; the medium is told that it relies on that.
    Always,
    /// Never: completed writes survive the process, not the loss of power.
    Never,
}

impl Crashing {
    /// Opens what `image` holds, which a crash may have left in any state.
    ///
    /// `config.payload_bytes_max` must be the same whenever one image is opened.
    pub fn open(image: CrashImage, config: MemoryConfig, flush: FlushPolicy) -> Self {
        let mut tier = Self {
            place_bytes: record_bytes(config.payload_bytes_max),
            live: MemoryTier::new(config),
            image,
            flush,
            places: BTreeMap::new(),
            free: Vec::new(),
            next_place: 0,
            records: BTreeMap::new(),
            recovered_chunks: 0,
            scratch: Vec::new(),
        };
        tier.recover();
        tier
    }

    /// The medium, to stop it, crash it, or ask it.
    pub fn image(&self) -> CrashImage {
        self.image.clone()
    }

    fn recover(&mut self) {
        for place in 0..self.image.end().div_ceil(self.place_bytes) {
            self.next_place = place + 1;
            match self.found_at(place) {
                Some((digest, held, bytes)) if self.live.adopt(digest, held, &bytes) => {
                    self.places.insert(digest, place);
                    self.recovered_chunks += 1;
                }
                _ => {
                    // A record that is torn, or the second of two copies: it must not be found again later.
                    if self.image.write(place * self.place_bytes, &[0; HEADER_BYTES]).is_ok() {
                        self.free.push(place);
                    }
                }
            }
        }
    }

    /// The record at `place`, if it is whole.
    fn found_at(&self, place: u64) -> Option<(Digest, Held, Vec<u8>)> {
        let mut bytes = vec![0; HEADER_BYTES];
        let offset = place * self.place_bytes;
        self.image.read(offset, &mut bytes);
        let header = ChunkHeader::parse(&bytes).ok()?;
        let payload_bytes = header.payload_bytes();
        if record_bytes(payload_bytes) > self.place_bytes {
            return None;
        }
        bytes.resize(HEADER_BYTES + usize::try_from(payload_bytes).ok()?, 0);
        self.image.read(offset, &mut bytes);
        header.verify_payload(&bytes[HEADER_BYTES..]).ok()?;
        Some((header.digest(), Held { payload_bytes, write_id: header.write_id() }, bytes))
    }

    fn persist(&mut self, record: &Record) -> Result<(), Dead> {
        let place = self.free.pop().unwrap_or_else(|| {
            self.next_place += 1;
            self.next_place - 1
        });
        self.places.insert(record.digest(), place);
        let offset = place * self.place_bytes;
        let stored = record.stored_bytes();
        self.image.write(offset, stored)?;
        if self.flush == FlushPolicy::Always {
            self.image.flush()?;
            self.image.rely_on(offset..offset + stored.len() as u64);
        }
        Ok(())
    }

    /// Makes the record at `digest`'s place unreadable and the place free.
    fn forget(&mut self, digest: Digest) {
        let Some(place) = self.places.remove(&digest) else { return };
        let erased = self.image.write(place * self.place_bytes, &[0; HEADER_BYTES]);
        let flushed = erased.and_then(|()| match self.flush {
            FlushPolicy::Always => self.image.flush(),
            FlushPolicy::Never => Ok(()),
        });
        // On a dead medium the record stays: it is never written again.
        if flushed.is_ok() {
            self.free.push(place);
        }
    }

    fn dead(&self, call: &'static str, length: u64) -> TierError {
        let path = PathBuf::from(self.live.name());
        let context = IoContext { call, path, offset: 0, length };
        TierError::io(context, io::Error::from_raw_os_error(libc::EIO))
    }

    fn write_result(
        &mut self,
        id: OpId,
        digest: Digest,
        result: Result<(), TierError>,
    ) -> Result<(), TierError> {
        let record = self.records.remove(&id);
        result?;
        let record = record.ok_or_else(|| self.dead("write", 0))?;
        if self.persist(&record).is_ok() {
            return Ok(());
        }
        self.live.remove(digest, 0);
        self.places.remove(&digest);
        Err(self.dead("write", record.stored_bytes().len() as u64))
    }
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Crashing {
    fn name(&self) -> &str {
        self.live.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { persistent: true, ..self.live.capabilities() }
    }

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        let write = match &op {
            Op::Read(_) => None,
            Op::Write(write) => Some((write.id, Arc::clone(&write.record))),
        };
        self.live.submit(op, now_ns)?;
        self.records.extend(write);
        Ok(())
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let next_ns = self.live.poll(now_ns, guard, &mut scratch);
        for completion in scratch.drain(..) {
            completions.push(match completion {
                Completion::Read { id, digest, slot, result: Ok(done) } if self.image.is_dead() => {
                    let result = Err(self.dead("read", done.payload_bytes as u64));
                    Completion::Read { id, digest, slot, result }
                }
                Completion::Write { id, digest, result } => {
                    let result = self.write_result(id, digest, result);
                    Completion::Write { id, digest, result }
                }
                Completion::Evicted { digest } => {
                    self.forget(digest);
                    Completion::Evicted { digest }
                }
                other => other,
            });
        }
        self.scratch = scratch;
        next_ns
    }

    fn hold_writes(&mut self, hold: bool) {
        self.live.hold_writes(hold);
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.live.contains(digest)
    }

    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        self.live.locate(digest, now_ns)
    }

    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool {
        let removed = self.live.remove(digest, now_ns);
        self.forget(digest);
        removed
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        self.live.list(visit);
    }

    fn list_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        self.live.list_from(from, max, visit)
    }

    fn in_flight(&self) -> usize {
        self.live.in_flight()
    }

    fn stats(&self) -> TierStats {
        TierStats { recovered_chunks: self.recovered_chunks, ..self.live.stats() }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.live.wake_fd()
    }

    fn close(&mut self) {
        self.live.close();
    }
}
