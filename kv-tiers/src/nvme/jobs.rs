//! Reads, writes and wipes, from their start to their end.

use std::{collections::VecDeque, io, sync::Arc};

use kv_chunk::{Digest, HEADER_BYTES};

use crate::{
    Completion, EvictionGuard, Held, OpId, ReadDone, ReadOp, Record, Slot, TierError,
    nvme::{
        NvmeTier,
        backend::Ended,
        class_of,
        index::Place,
        room::Room,
        segment::{BLOCK, BLOCK_LEN},
        transfer::{Direction, Failure, Memory, Run, Transfer},
    },
    piece_range,
};

/// Failed reads of one slot after which its chunk counts as lost.
const READ_ERRORS_MAX: u8 = 3;

/// What a transfer is for.
#[derive(Debug)]
pub(super) enum Job {
    Read {
        id: OpId,
        digest: Digest,
        place: Place,
        done: ReadDone,
    },
    /// The payload first: until the header is there, the slot holds no chunk.
    WritePayload {
        id: OpId,
        place: Place,
    },
    WriteHeader {
        id: OpId,
        place: Place,
    },
    Wipe {
        place: Place,
    },
}

/// Bytes of the slot that a read of this chunk uses.
pub(super) fn bytes_in_slot(read: &ReadOp, payload_bytes: u64) -> u64 {
    let range = piece_range(payload_bytes, &read.blocks);
    class_of(range.end - range.start)
}

impl NvmeTier {
    fn file_and_offset(&self, place: Place) -> Option<(Arc<crate::nvme::files::SegmentFile>, u64)> {
        let segment = self.index.segment(place.row)?;
        Some((Arc::clone(&segment.file), segment.geometry.slot_offset(place.slot)))
    }

    fn start(&mut self, job: Job, direction: Direction, memory: Memory, runs: [Run; 2]) {
        let place = job.place();
        let Some((file, offset)) = self.file_and_offset(place) else {
            debug_assert!(false, "a segment with work is never removed");
            return;
        };
        let runs = runs.map(|run| Run { file_offset: offset + run.file_offset, ..run });
        let key = self.next_key;
        self.next_key += 1;
        self.jobs.insert(key, job);
        if let Some(backend) = &mut self.backend {
            backend.start(Transfer { key, direction, file, memory, runs });
        }
    }

    /// Starts all queued reads: before any write may evict what they want.
    pub(super) fn start_reads(&mut self, completions: &mut Vec<Completion>) {
        while let Some(read) = self.reads.pop_front() {
            let Some(entry) = self.index.begin_read(read.digest, read.purpose) else {
                let error = TierError::NotFound { digest: read.digest };
                self.end_read(read.id, read.digest, read.slot, Err(error), completions);
                continue;
            };
            match runs_of(&read, entry.held) {
                Ok((done, runs)) => {
                    let ReadOp { id, digest, slot, .. } = read;
                    let job = Job::Read { id, digest, place: entry.place, done };
                    self.start(job, Direction::Read, Memory::Slot(slot), runs);
                }
                Err(error) => {
                    self.unpin(entry.place);
                    self.end_read(read.id, read.digest, read.slot, Err(error), completions);
                }
            }
        }
    }

    /// Starts every queued write for which there is room.
    pub(super) fn start_writes(
        &mut self,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) {
        let mut waiting = VecDeque::new();
        self.space.begin_pass();
        while let Some(write) = self.writes.pop_front() {
            let digest = write.record.digest();
            if self.index.get(digest).is_some() {
                let error = TierError::AlreadyHeld { digest };
                self.end_write(write.id, digest, Err(error), completions);
                continue;
            }
            if self.writing.contains(&digest) {
                waiting.push_back(write);
                continue;
            }
            let record_bytes = class_of(write.record.header().payload_bytes());
            match self.find_room(record_bytes, guard, completions) {
                Room::Now(place) => {
                    self.note_slot_taken(record_bytes);
                    self.writing.insert(digest);
                    self.start_write(write.id, place, write.record);
                }
                Room::Later => waiting.push_back(write),
                Room::Never(error) => self.end_write(write.id, digest, Err(error), completions),
            }
        }
        self.writes = waiting;
    }

    fn start_write(&mut self, id: OpId, place: Place, record: Arc<Record>) {
        let bytes = record.stored_bytes().len() - HEADER_BYTES;
        if bytes == 0 {
            return self.start_write_header(id, place, Memory::Record(record));
        }
        let payload = Run { file_offset: BLOCK, memory_offset: HEADER_BYTES, bytes };
        let job = Job::WritePayload { id, place };
        self.start(job, Direction::Write, Memory::Record(record), [payload, NOTHING]);
    }

    fn start_write_header(&mut self, id: OpId, place: Place, memory: Memory) {
        self.start(Job::WriteHeader { id, place }, Direction::Write, memory, [HEADER, NOTHING]);
    }

    /// Overwrites the header of a slot, so that a restart does not find it.
    pub(super) fn start_wipe(&mut self, place: Place) {
        self.start(Job::Wipe { place }, Direction::Write, Memory::Zeros, [HEADER, NOTHING]);
    }

    fn unpin(&mut self, place: Place) {
        if let Some(place) = self.index.end_read(place) {
            self.start_wipe(place);
        }
    }

    /// Takes a transfer that ended.
    pub(super) fn end_transfer(&mut self, ended: Ended, completions: &mut Vec<Completion>) {
        let refused_direct = ended
            .failure
            .is_some_and(|failure| failure.errno == libc::EINVAL && ended.transfer.file.direct());
        if refused_direct && self.fall_back_to_buffered(&ended) {
            return self.restart(ended.transfer);
        }
        let Some(job) = self.jobs.remove(&ended.transfer.key) else { return };
        match job {
            Job::Read { id, digest, place, done } => {
                self.end_read_transfer(id, digest, place, done, ended, completions);
            }
            Job::WritePayload { id, place } => match ended.failure {
                None => self.start_write_header(id, place, ended.transfer.memory),
                Some(failure) => {
                    let full = [libc::ENOSPC, libc::EDQUOT].contains(&failure.errno);
                    self.index.end_failed_write(place, full);
                    self.end_failed_write(id, &ended.transfer, failure, completions);
                }
            },
            Job::WriteHeader { id, place } => match ended.failure {
                None => self.publish(id, place, &ended.transfer.memory, completions),
                Some(failure) => {
                    self.index.end_failed_write(place, false);
                    self.end_failed_write(id, &ended.transfer, failure, completions);
                }
            },
            Job::Wipe { place } => {
                if let Some(failure) = ended.failure {
                    let error = error_of(&ended.transfer, failure);
                    tracing::warn!(tier = self.config.name, %error, "a slot was not wiped: unused from now on");
                    self.stats.count_error(error.kind());
                }
                self.index.end_wipe(place, ended.failure.is_none());
            }
        }
    }

    fn restart(&mut self, transfer: Transfer) {
        let Some(place) = self.jobs.get(&transfer.key).map(Job::place) else { return };
        let Some((file, _)) = self.file_and_offset(place) else { return };
        if let Some(backend) = &mut self.backend {
            backend.start(Transfer { file, ..transfer });
        }
    }

    fn end_read_transfer(
        &mut self,
        id: OpId,
        digest: Digest,
        place: Place,
        done: ReadDone,
        ended: Ended,
        completions: &mut Vec<Completion>,
    ) {
        let Transfer { file, memory, runs, .. } = &ended.transfer;
        if !file.direct() {
            let moved = runs.iter().filter(|run| run.bytes > 0);
            moved.for_each(|run| file.forget_cached(run.file_offset, run.bytes as u64));
        }
        debug_assert!(matches!(memory, Memory::Slot(_)), "reads of chunks land in slots");
        let result = match ended.failure {
            None => Ok(done),
            Some(failure) => {
                let gone =
                    failure.errno == 0 || self.index.count_read_error(place) >= READ_ERRORS_MAX;
                if gone && let Some(digest) = self.index.lose(place) {
                    let error = error_of(&ended.transfer, failure);
                    tracing::warn!(tier = self.config.name, %error, "a chunk is lost");
                    completions.push(Completion::Lost { digest, error });
                }
                Err(error_of(&ended.transfer, failure))
            }
        };
        self.unpin(place);
        if let Memory::Slot(slot) = ended.transfer.memory {
            self.end_read(id, digest, slot, result, completions);
        }
    }

    fn end_read(
        &mut self,
        id: OpId,
        digest: Digest,
        slot: Slot,
        result: Result<ReadDone, TierError>,
        completions: &mut Vec<Completion>,
    ) {
        self.ops -= 1;
        self.stats.count_read(&result);
        completions.push(Completion::Read { id, digest, slot, result });
    }

    fn publish(
        &mut self,
        id: OpId,
        place: Place,
        memory: &Memory,
        completions: &mut Vec<Completion>,
    ) {
        let Memory::Record(record) = memory else { return };
        let header = record.header();
        let (digest, payload_bytes) = (header.digest(), header.payload_bytes());
        self.index.publish(place, digest, Held { payload_bytes, write_id: header.write_id() });
        self.writing.remove(&digest);
        self.stats.writes += 1;
        self.stats.write_bytes += payload_bytes;
        self.end_write(id, digest, Ok(()), completions);
    }

    fn end_failed_write(
        &mut self,
        id: OpId,
        transfer: &Transfer,
        failure: Failure,
        completions: &mut Vec<Completion>,
    ) {
        let Memory::Record(record) = &transfer.memory else { return };
        let digest = record.digest();
        self.writing.remove(&digest);
        self.end_write(id, digest, Err(error_of(transfer, failure)), completions);
    }

    fn end_write(
        &mut self,
        id: OpId,
        digest: Digest,
        result: Result<(), TierError>,
        completions: &mut Vec<Completion>,
    ) {
        self.ops -= 1;
        if let Err(error) = &result {
            self.stats.count_error(error.kind());
        }
        completions.push(Completion::Write { id, digest, result });
    }
}

impl Job {
    fn place(&self) -> Place {
        match self {
            Self::Read { place, .. }
            | Self::WritePayload { place, .. }
            | Self::WriteHeader { place, .. }
            | Self::Wipe { place } => *place,
        }
    }
}

/// Offsets are relative to the slot.
const HEADER: Run = Run { file_offset: 0, memory_offset: 0, bytes: BLOCK_LEN };
const NOTHING: Run = Run { file_offset: 0, memory_offset: 0, bytes: 0 };

/// What a read brings, and where it lies relative to the slot: one run where header and payload are neighbours.
fn runs_of(read: &ReadOp, held: Held) -> Result<(ReadDone, [Run; 2]), TierError> {
    let range = piece_range(held.payload_bytes, &read.blocks);
    if bytes_in_slot(read, held.payload_bytes) > read.slot.len() as u64 {
        // The chunk changed between submit and poll: another one under this digest is larger.
        return Err(TierError::Config {
            field: "blocks",
            problem: format!("{:?} are more bytes than the slot has", read.blocks),
            fix: "use larger slots, or ask for fewer blocks".to_owned(),
        });
    }
    let payload_bytes = usize::try_from(range.end - range.start).expect("a slot holds it");
    let bytes = payload_bytes.next_multiple_of(BLOCK_LEN);
    let done = ReadDone { first_block: read.blocks.start, payload_bytes };
    if range.start == 0 || payload_bytes == 0 {
        return Ok((done, [Run { bytes: HEADER_BYTES + bytes, ..HEADER }, NOTHING]));
    }
    let piece = Run { file_offset: BLOCK + range.start, memory_offset: HEADER_BYTES, bytes };
    Ok((done, [HEADER, piece]))
}

/// The error of a transfer that ended early.
pub(super) fn error_of(transfer: &Transfer, failure: Failure) -> TierError {
    let call = match transfer.direction {
        Direction::Read => "read",
        Direction::Write => "write",
    };
    let Failure { errno, run, moved } = failure;
    let context = transfer.file.context(call, run.file_offset, run.bytes as u64);
    if errno == 0 {
        return TierError::Short { context, done: moved };
    }
    TierError::io(context, io::Error::from_raw_os_error(errno))
}
