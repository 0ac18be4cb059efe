//! Memory as a storage tier: chunks on a [`Medium`], found again after a restart or a crash.

use std::{collections::VecDeque, os::fd::BorrowedFd};

use hashlink::LinkedHashMap;
use kv_chunk::{Digest, HEADER_BYTES, MAX_PAYLOAD_BYTES};
use kv_tiers::{
    Capabilities, Completion, EvictionGuard, Held, Op, Purpose, ReadDone, ReadOp, RejectReason,
    Rejected, Tier, TierError, TierStats, WriteOp, record_bytes,
};

use crate::{
    Extent, FastTierError, Medium, Places,
    copy::{PendingRead, Writing},
    map::context,
    media::{self, Entry, Found, Layout},
    readers::{Ended, Readers},
    recover::{self, Recovered},
    space::Space,
};

/// What a tier over memory shall be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DaxTierConfig {
    /// Its name, for reports.
    pub name: String,
    /// Largest payload accepted.
    pub payload_bytes_max: u64,
    /// Ops that may be in flight; at least 1.
    pub queue_ops_max: u32,
    /// Chunks that a new store can hold; `None`: one for each 64 KiB of the medium. A store keeps what it was made with.
    pub entries: Option<u32>,
    /// Chunks begin at multiples of this power of two, 4096 or more: a staging granule, so that no two share one.
    pub place_align_bytes: u64,
    /// When the medium is made an empty store.
    pub format: Format,
    /// A poll moves no more than this, also of one op, and comes back for the rest; at least 4096. What the medium takes for
    /// so many bytes is how long a poll keeps its caller.
    pub poll_bytes_max: usize,
    /// Threads that read, each one chunk at a time, where the medium has a [`reader`](crate::Medium::reader): a poll then
    /// moves nothing of reads. 0: a poll reads, one chunk after the other.
    pub read_threads: usize,
    /// For tools: nothing on the medium is made or mended, and no chunk is taken. Removals are done, and first of all what
    /// an ordinary opening would have mended.
    pub look_only: bool,
}

impl DaxTierConfig {
    /// Defaults: payloads of any size, 64 ops in flight, places of 4 KiB, 4 MiB a poll, 8 threads, made if the medium
    /// is blank.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            payload_bytes_max: MAX_PAYLOAD_BYTES,
            queue_ops_max: 64,
            entries: None,
            place_align_bytes: 4096,
            format: Format::IfBlank,
            poll_bytes_max: 4 << 20,
            read_threads: 8,
            look_only: false,
        }
    }
}

/// When a medium is made an empty store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// If its first 4 KiB are zeros, or are the damaged first page of a store of this version.
    IfBlank,
    /// Always: whatever it holds is lost.
    Always,
}

/// Where a chunk is. A place is used again after its chunk is gone, with another generation: whoever kept one asks
/// [`DaxTier::place`] again before relying on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Header, payload and padding.
    pub extent: Extent,
    /// Of this writing of this chunk, unique while the store is open.
    pub generation: u64,
}

/// Chunks in the memory of a device, each in one piece, evicted least recently used first.
///
/// A write copies the record in, flushes it, then writes and flushes its entry in the table: the order that makes a crash
/// leave each chunk whole or absent. A removal clears and flushes the entry before the bytes may be used again. Reads and
/// writes are copies made in [`poll`](Tier::poll), [`poll_bytes_max`](DaxTierConfig::poll_bytes_max) at a time; reads by
/// [`read_threads`](DaxTierConfig::read_threads), if there are any.
#[derive(Debug)]
pub struct DaxTier {
    config: DaxTierConfig,
    medium: Box<dyn Medium>,
    layout: Layout,
    space: Space,
    /// Least recently used first.
    chunks: LinkedHashMap<Digest, Chunk>,
    free_entries: Vec<u32>,
    next_generation: u64,
    /// Told of every chunk that comes or goes.
    places: Places,
    /// Of the first a part may be copied.
    reads: VecDeque<PendingRead>,
    /// Of those that a thread has.
    readers: Option<Readers>,
    writes: VecDeque<WriteOp>,
    /// The write whose bytes are being copied in.
    writing: Option<Writing>,
    /// Entries that could not be cleared, and so keep their places.
    stuck: u64,
    hold_writes: bool,
    closed: bool,
    counters: TierStats,
    findings: DaxFindings,
    /// Entries that are to be cleared before any other changes.
    unmended: Vec<u32>,
}

/// What an opening found besides chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DaxFindings {
    /// Entries of the table that are torn, or name what is not there.
    pub torn_entries: u64,
    /// Chunks that a later version wrote: left alone.
    pub newer_chunks: u64,
    /// The first page is damaged: whatever the store held is lost.
    pub is_first_page_damaged: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) held: Held,
    pub(crate) place: Place,
    pub(crate) entry: u32,
}

impl DaxTier {
    /// Opens the store on `medium`, or makes one where [`Format`] says so. Each entry of the table and the header of each
    /// chunk is checked; what does not agree is dropped.
    pub fn open(config: DaxTierConfig, mut medium: Box<dyn Medium>) -> Result<Self, TierError> {
        let align = config.place_align_bytes;
        if !align.is_power_of_two() || align < 4096 {
            return Err(TierError::Config {
                field: "place_align_bytes",
                problem: format!("{align} is not a power of two of at least 4096"),
                fix: "use 4096, or the device's staging granule".into(),
            });
        }
        let store = recover::store(&config, &mut *medium)?;
        let layout = store.layout;
        let whole = Extent {
            offset: layout.data_offset,
            bytes: layout.medium_bytes.saturating_sub(layout.data_offset),
        };
        let space = Space::new(whole, align);
        let recovered = recover::chunks(&mut *medium, &store, space, config.look_only)?;
        let findings = DaxFindings {
            torn_entries: recovered.dropped,
            newer_chunks: recovered.newer_chunks,
            is_first_page_damaged: store.found == Found::Damaged,
        };
        let Recovered { chunks, free_entries, next_generation, space, stuck, unmended, .. } =
            recovered;
        let mut counters = TierStats::default();
        counters.recovered_chunks = chunks.len() as u64;
        let places = Places::default();
        chunks.iter().for_each(|(digest, chunk)| places.put(*digest, chunk.place));
        let config = DaxTierConfig {
            queue_ops_max: config.queue_ops_max.max(1),
            poll_bytes_max: config.poll_bytes_max.max(4096),
            ..config
        };
        let readers = readers(&config, &*medium)?;
        Ok(Self {
            config,
            medium,
            layout,
            space,
            chunks,
            free_entries,
            next_generation,
            places,
            reads: VecDeque::new(),
            readers,
            writes: VecDeque::new(),
            writing: None,
            stuck,
            hold_writes: false,
            closed: false,
            counters,
            findings,
            unmended,
        })
    }

    /// Where a readable chunk is: what a claim on it stages and protects.
    pub fn place(&self, digest: Digest) -> Option<Place> {
        self.chunks.get(&digest).map(|chunk| chunk.place)
    }

    /// What the opening found besides chunks.
    pub fn findings(&self) -> DaxFindings {
        self.findings
    }

    /// Where every readable chunk is, to be asked from any thread.
    pub fn places(&self) -> Places {
        self.places.clone()
    }

    fn payload_bytes_max(&self) -> u64 {
        let room = self.space.bytes().saturating_sub(HEADER_BYTES as u64);
        self.config.payload_bytes_max.min(room)
    }

    fn accept_read(&mut self, op: ReadOp) -> Result<(), Rejected> {
        let chunk = self.chunks.get(&op.digest).copied();
        if let Some(Chunk { held, .. }) = &chunk {
            if op.bytes_in_slot(held.payload_bytes) > op.slot.len() as u64 {
                return Err(Rejected { op: Op::Read(op), reason: RejectReason::TooLarge });
            }
            if op.purpose == Purpose::Use {
                self.chunks.to_back(&op.digest);
            }
        }
        self.reads.push_back(PendingRead::new(op, chunk));
        Ok(())
    }

    /// Takes what the threads have read, and hands them what waits.
    fn pass_reads(&mut self, completions: &mut Vec<Completion>) {
        let Some(readers) = &mut self.readers else { return };
        readers.hush();
        while let Some(Ended { read, result }) = readers.next_ended() {
            self.counters.device_requests += result.as_ref().map_or(1, |requests| *requests);
            let result = match result {
                // All of it was asked for.
                Ok(_) => read.done().unwrap_or(Err(FastTierError::Stopped.into())),
                Err(error) => Err(error.into()),
            };
            end_read(&mut self.counters, read, result, completions);
        }
        while readers.room() > 0
            && let Some(read) = self.reads.pop_front()
        {
            let unread = match read.done() {
                // There is no such chunk.
                Some(done) => Some((read, done)),
                None => readers.begin(read).map(|read| (read, Err(FastTierError::Stopped.into()))),
            };
            if let Some((read, result)) = unread {
                end_read(&mut self.counters, read, result, completions);
            }
        }
    }

    fn reads_in_flight(&self) -> usize {
        self.reads.len() + self.readers.as_ref().map_or(0, Readers::in_flight)
    }

    /// Copies reads out, in order, up to `left` bytes; gives what is left of that.
    fn run_reads(&mut self, mut left: usize, completions: &mut Vec<Completion>) -> usize {
        while left > 0
            && let Some(pending) = self.reads.front_mut()
        {
            let copied = pending.copy(&*self.medium, left);
            self.counters.device_requests += u64::from(matches!(copied, Ok(1..)));
            let result = match copied {
                Ok(bytes) => {
                    left -= bytes;
                    let Some(done) = pending.done() else { continue };
                    done
                }
                Err(error) => Err(error.into()),
            };
            let Some(read) = self.reads.pop_front() else { break };
            end_read(&mut self.counters, read, result, completions);
        }
        left
    }

    /// Copies writes in, one after the other, up to `left` bytes. Only a write overwrites what is free, and none begins
    /// while a read is queued or under way: a chunk that was removed or evicted after a read of it was accepted is still there for it.
    fn run_writes(
        &mut self,
        mut left: usize,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) {
        while left > 0 && self.reads_in_flight() == 0 && !self.hold_writes {
            if self.writing.is_none() && !self.begin_write(guard, completions) {
                break;
            }
            let Some(mut writing) = self.writing.take() else { continue };
            let result = match writing.copy(&mut *self.medium, left) {
                Ok(bytes) => {
                    left -= bytes;
                    if !writing.is_whole() {
                        self.writing = Some(writing);
                        continue;
                    }
                    self.publish(&writing)
                }
                Err(error) => {
                    self.give_back(&writing);
                    Err(error.into())
                }
            };
            self.write_ended(&writing.op, result, completions);
        }
    }

    /// Takes the next write and a place for it, or ends it; false if there is none.
    fn begin_write(
        &mut self,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> bool {
        let Some(op) = self.writes.pop_front() else { return false };
        let digest = op.record.digest();
        let wanted_bytes = record_bytes(op.record.header().payload_bytes());
        let result = if self.chunks.contains_key(&digest) {
            Err(TierError::AlreadyHeld { digest })
        } else if let Some((entry, extent)) = self.make_room(wanted_bytes, guard, completions) {
            self.writing = Some(Writing { op, entry, extent, copied: 0 });
            return true;
        } else {
            let capacity_bytes = self.layout.medium_bytes;
            Err(TierError::NoSpace { wanted_bytes, capacity_bytes })
        };
        self.write_ended(&op, result, completions);
        true
    }

    fn write_ended(
        &mut self,
        op: &WriteOp,
        result: Result<(), TierError>,
        completions: &mut Vec<Completion>,
    ) {
        self.counters.count_write(op.record.header().payload_bytes(), &result);
        completions.push(Completion::Write { id: op.id, digest: op.record.digest(), result });
    }

    fn give_back(&mut self, writing: &Writing) {
        self.space.give(writing.extent);
        self.free_entries.push(writing.entry);
    }

    /// The bytes are there: they are flushed, then what names them is written.
    fn publish(&mut self, writing: &Writing) -> Result<(), TierError> {
        let Writing { op, entry, extent, .. } = writing;
        let (digest, header) = (op.record.digest(), op.record.header());
        let held = Held { payload_bytes: header.payload_bytes(), write_id: header.write_id() };
        let generation = self.next_generation;
        self.next_generation += 1;
        self.counters.device_requests += 2;
        let bytes = op.record.stored_bytes().len() as u64;
        if let Err(error) = self.medium.flush(Extent { offset: extent.offset, bytes }) {
            self.give_back(writing);
            return Err(error.into());
        }
        let line = Entry { generation, digest, held, offset: extent.offset };
        let chunk = Chunk { held, place: Place { extent: *extent, generation }, entry: *entry };
        if let Err(error) = media::write_entry(&mut *self.medium, *entry, &line) {
            // It may stand there or not: it must not, before anything of it is used again.
            self.forget(chunk);
            return Err(error.into());
        }
        self.chunks.insert(digest, chunk);
        self.places.put(digest, chunk.place);
        Ok(())
    }

    /// A free entry and a place; evicts until there are both. Each resident chunk is proposed once at most.
    fn make_room(
        &mut self,
        wanted_bytes: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<(u32, Extent)> {
        let mut proposals_left = self.chunks.len();
        loop {
            if !self.free_entries.is_empty()
                && let Some(extent) = self.space.take(wanted_bytes)
            {
                return self.free_entries.pop().map(|entry| (entry, extent));
            }
            let (&digest, &chunk) = self.chunks.front().filter(|_| proposals_left > 0)?;
            proposals_left -= 1;
            if guard.try_evict(digest) {
                self.chunks.remove(&digest);
                self.places.remove(digest);
                self.counters.evictions += 1;
                completions.push(Completion::Evicted { digest });
                self.forget(chunk);
            } else {
                // Somebody uses it: it is not the least recently used any more.
                self.chunks.to_back(&digest);
            }
        }
    }

    /// Clears a chunk's entry; then its bytes may be overwritten.
    fn forget(&mut self, chunk: Chunk) {
        for entry in std::mem::take(&mut self.unmended) {
            self.stuck += u64::from(media::clear_entry(&mut *self.medium, entry).is_err());
        }
        if media::clear_entry(&mut *self.medium, chunk.entry).is_err() {
            // The next open may find it, so its bytes stay as they are.
            self.stuck += 1;
            return;
        }
        self.free_entries.push(chunk.entry);
        self.space.give(chunk.place.extent);
    }
}

/// The threads that `config` asks for, if the medium can be read by threads.
fn readers(config: &DaxTierConfig, medium: &dyn Medium) -> Result<Option<Readers>, TierError> {
    let Some(reader) = medium.reader().filter(|_| config.read_threads > 0) else { return Ok(None) };
    let started = Readers::start(config.read_threads, &reader);
    let extent = Extent::default();
    let failed = |error| FastTierError::io(context("start readers", medium.path(), extent), &error);
    Ok(Some(started.map_err(failed)?))
}

fn end_read(
    counters: &mut TierStats,
    read: PendingRead,
    result: Result<ReadDone, TierError>,
    completions: &mut Vec<Completion>,
) {
    let ReadOp { id, digest, slot, .. } = read.op;
    counters.count_read(&result);
    completions.push(Completion::Read { id, digest, slot, result });
}

impl Tier for DaxTier {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities =
            Capabilities::new(self.payload_bytes_max(), self.config.queue_ops_max);
        capabilities.persistent = true;
        capabilities
    }

    fn submit(&mut self, op: Op, _now_ns: u64) -> Result<(), Rejected> {
        if self.closed || (self.config.look_only && matches!(op, Op::Write(_))) {
            return Err(Rejected { op, reason: RejectReason::Closed });
        }
        if self.in_flight() >= self.config.queue_ops_max as usize {
            return Err(Rejected { op, reason: RejectReason::QueueFull });
        }
        match op {
            Op::Read(read) => self.accept_read(read)?,
            Op::Write(write) => {
                let payload_bytes = write.record.header().payload_bytes();
                let place = self.space.rounded(record_bytes(payload_bytes));
                if payload_bytes > self.payload_bytes_max() || place > self.space.bytes() {
                    let op = Op::Write(write);
                    return Err(Rejected { op, reason: RejectReason::TooLarge });
                }
                self.writes.push_back(write);
            }
        }
        let in_flight = u32::try_from(self.in_flight()).unwrap_or(u32::MAX);
        self.counters.in_flight_max = self.counters.in_flight_max.max(in_flight);
        Ok(())
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        let mut left = self.config.poll_bytes_max;
        if self.readers.is_some() {
            self.pass_reads(completions);
        } else {
            left = self.run_reads(left, completions);
        }
        self.run_writes(left, guard, completions);
        let writes = self.writes.len() + usize::from(self.writing.is_some());
        let is_left = match self.reads_in_flight() {
            0 => !self.hold_writes && writes > 0,
            // The threads ring.
            _ => self.readers.is_none(),
        };
        is_left.then_some(now_ns)
    }

    fn hold_writes(&mut self, hold: bool) {
        self.hold_writes = hold;
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.chunks.get(&digest).map(|chunk| chunk.held)
    }

    fn remove(&mut self, digest: Digest, _now_ns: u64) -> bool {
        let Some(chunk) = self.chunks.remove(&digest) else { return false };
        self.places.remove(digest);
        self.forget(chunk);
        true
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        for (digest, chunk) in &self.chunks {
            visit(*digest, chunk.held);
        }
    }

    fn in_flight(&self) -> usize {
        self.reads_in_flight() + self.writes.len() + usize::from(self.writing.is_some())
    }

    fn stats(&self) -> TierStats {
        let mut stats = self.counters.clone();
        stats.used_bytes = self.layout.data_offset + self.space.used_bytes();
        stats.capacity_bytes = self.layout.medium_bytes;
        stats.chunks = self.chunks.len() as u64;
        stats.removals_pending = self.stuck;
        stats
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.readers.as_ref().map(Readers::bell)
    }

    fn close(&mut self) {
        self.closed = true;
    }
}
