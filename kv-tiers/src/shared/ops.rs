//! Reads and writes from submit to completion.

use std::{collections::VecDeque, sync::Arc};

use kv_chunk::{Digest, WriteId};

use super::{
    SharedTier,
    collect::Room,
    config::OpenAs,
    index::Entry,
    inspect::If,
    jobs::{Bytes, Done, Job, hung},
    paths::Fan,
    publish::{Spent, Stored, Temporary},
    space::signed,
};
use crate::{
    Completion, EvictionGuard, OpId, Purpose, ReadDone, ReadOp, Slot, TierError, WriteOp,
    record_bytes,
};

#[derive(Debug)]
pub(super) struct QueuedRead {
    pub(super) op: ReadOp,
    /// The chunk was removed before the read was submitted.
    pub(super) doomed: bool,
}

#[derive(Debug)]
pub(super) struct QueuedWrite {
    pub(super) op: WriteOp,
    /// It was held half-way.
    pub(super) begun: Option<Temporary>,
    pub(super) since_ns: u64,
    /// How many countings had begun when it first found no room.
    pub(super) asked_round: Option<u64>,
}

/// What a job is for.
#[derive(Debug)]
pub(super) enum Running {
    /// `known`: the writing of the chunk that was there as far as was known when the read began.
    Read {
        id: OpId,
        digest: Digest,
        known: Option<WriteId>,
        touched: bool,
    },
    /// Without an op once it has failed by time: the record stays with the thread.
    Write {
        op: Option<WriteOp>,
        digest: Digest,
        reserved: u64,
        since_ns: u64,
    },
    Look,
    Discard {
        digest: Digest,
    },
    ListFans,
    Scan(Fan),
    RemoveTemporary,
    Survey,
}

impl SharedTier {
    pub(super) fn take_done(
        &mut self,
        running: Running,
        done: Done,
        now_ns: u64,
        completions: &mut Vec<Completion>,
    ) {
        match (running, done) {
            (Running::Read { id, digest, known, touched }, Done::Read { slot, result }) => {
                let result = self.read_ended(digest, result, known, touched, now_ns);
                self.complete_read(id, digest, slot, result, completions);
            }
            (Running::Write { op, digest, reserved, .. }, Done::Write { result, spent }) => {
                self.write_ended(op, digest, reserved, result, spent, now_ns, completions);
            }
            (Running::Look, Done::Looked(answers)) => self.take_answers(answers, now_ns),
            (Running::Discard { digest }, Done::Discarded(result)) => {
                self.removal_ended(digest, result);
            }
            (Running::ListFans, Done::Fans(fans)) => match fans {
                Ok(fans) => self.space.listed(fans),
                Err(error) => self.counting_failed(&error),
            },
            (Running::Scan(fan), Done::Scanned(scan)) => match scan {
                Ok(scan) => self.take_scan(fan, scan, now_ns),
                Err(error) => self.counting_failed(&error),
            },
            (Running::RemoveTemporary, Done::TemporaryRemoved(removed)) => {
                self.detail.stale_removed += u64::from(removed);
            }
            (running, _) => debug_assert!(false, "{running:?} ended as another job"),
        }
    }

    /// Fails what waits for threads that all hang, and writes that take too long.
    pub(super) fn expire(&mut self, now_ns: u64, completions: &mut Vec<Completion>) {
        let timeout_ns = self.config.op_timeout_ns;
        for running in self.running.values_mut() {
            if let Running::Write { op: late @ Some(_), digest, since_ns, reserved } = running
                && !self.hold_writes
                && now_ns >= since_ns.saturating_add(timeout_ns)
                && let Some(WriteOp { id, .. }) = late.take()
            {
                let error = hung("write", &self.config.directory, *reserved);
                self.stats.count_error(error.kind());
                self.detail.timed_out += 1;
                self.ops -= 1;
                completions.push(Completion::Write { id, digest: *digest, result: Err(error) });
            }
        }
        let hung_now = |lanes: &(super::Lane, super::Lane)| lanes.0.is_hung(now_ns, timeout_ns);
        if !self.lanes.as_ref().is_some_and(hung_now) {
            return;
        }
        for QueuedRead { op: ReadOp { id, digest, slot, .. }, .. } in
            std::mem::take(&mut self.reads)
        {
            self.detail.timed_out += 1;
            let error = hung("read", &self.config.directory, slot.len() as u64);
            self.complete_read(id, digest, slot, Err(error), completions);
        }
        if self.hold_writes {
            return;
        }
        for write in std::mem::take(&mut self.writes) {
            self.detail.timed_out += 1;
            let bytes = write.op.record.stored_bytes().len() as u64;
            let error = hung("write", &self.config.directory, bytes);
            if write.begun.is_some() {
                let fan = Fan::of(write.op.record.digest());
                self.space.change_ends(fan, bytes, 0);
            }
            self.complete_write(&write.op, Err(error), completions);
        }
    }

    /// When `expire` will have something to do, if nothing ends before.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let timeout_ns = self.config.op_timeout_ns;
        let late = self.running.values().filter_map(|running| match running {
            Running::Write { op: Some(_), since_ns, .. } if !self.hold_writes => {
                Some(since_ns.saturating_add(timeout_ns))
            }
            _ => None,
        });
        let waits = !self.reads.is_empty() || (!self.writes.is_empty() && !self.hold_writes);
        let hung = self.lanes.as_ref().and_then(|(data, _)| data.hung_from_ns(timeout_ns));
        late.chain(hung.filter(|_| waits)).min()
    }

    pub(super) fn start_reads(&mut self, now_ns: u64, completions: &mut Vec<Completion>) {
        while let Some(QueuedRead { op, doomed }) = self.reads.pop_front() {
            if doomed {
                let digest = op.digest;
                let result = Err(TierError::NotFound { digest });
                self.complete_read(op.id, digest, op.slot, result, completions);
                continue;
            }
            if !self.lanes.as_ref().is_some_and(|(data, _)| data.has_room()) {
                self.reads.push_front(QueuedRead { op, doomed });
                return;
            }
            let ReadOp { id, digest, blocks, slot, purpose } = op;
            let (every_ns, round) = (self.config.touch_every_ns, self.space.rounds_begun);
            let uses = purpose == Purpose::Use && self.config.open_as == OpenAs::Node;
            let entry = if uses { self.index.meet(digest) } else { None };
            let touch = entry.is_some_and(|entry| {
                let due =
                    entry.touched_ns.is_none_or(|at_ns| now_ns.saturating_sub(at_ns) >= every_ns);
                if due {
                    entry.touched_ns = Some(now_ns);
                    entry.touched_round = round;
                }
                due
            });
            let key = self.next_key();
            let known = self.index.get(digest).map(|entry| entry.held.write_id);
            let running = Running::Read { id, digest, known, touched: touch };
            self.running.insert(key, running);
            self.stats.device_requests += 1;
            if let Some((data, _)) = &mut self.lanes {
                data.send(key, Job::Read { digest, blocks, slot, touch }, now_ns);
            }
        }
    }

    fn read_ended(
        &mut self,
        digest: Digest,
        result: Result<Bytes, TierError>,
        known: Option<WriteId>,
        touched: bool,
        now_ns: u64,
    ) -> Result<ReadDone, TierError> {
        match result? {
            Bytes::Here(done, held) => {
                let round = self.space.rounds_begun;
                if let Some(entry) = self.index.get_mut(digest) {
                    entry.held = held;
                    if touched {
                        entry.touched_round = round;
                    }
                }
                return Ok(done);
            }
            // What has been written, or is being removed, since the read began is another matter.
            _ if self.index.get(digest).map(|entry| entry.held.write_id) != known => {}
            _ if self.doomed.contains_key(&digest) || self.writing.contains(&digest) => {}
            // Whoever only looks removes nothing.
            Bytes::Torn if self.config.open_as == OpenAs::Node => {
                self.index.remove(digest);
                self.doom(digest, If::Torn, 0);
                self.start_removals(now_ns);
            }
            Bytes::Torn | Bytes::Nothing | Bytes::Unusable => {
                self.index.remove(digest);
            }
        }
        Err(TierError::NotFound { digest })
    }

    fn complete_read(
        &mut self,
        id: OpId,
        digest: Digest,
        slot: Slot,
        result: Result<ReadDone, TierError>,
        completions: &mut Vec<Completion>,
    ) {
        self.ops -= 1;
        if let Some(readers) = self.readers.get_mut(&digest) {
            *readers -= 1;
            if *readers == 0 {
                self.readers.remove(&digest);
            }
        }
        self.stats.count_read(&result);
        completions.push(Completion::Read { id, digest, slot, result });
    }

    pub(super) fn start_writes(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) {
        let mut waiting: VecDeque<QueuedWrite> = VecDeque::new();
        let mut no_room = false;
        while let Some(mut write) = self.writes.pop_front() {
            let digest = write.op.record.digest();
            // Room of what is half written stays reserved.
            let reserved = record_bytes(write.op.record.header().payload_bytes());
            let has_thread = self.lanes.as_ref().is_some_and(|(data, _)| data.has_room());
            if no_room
                || !has_thread
                || self.writing.contains(&digest)
                || self.doomed.contains_key(&digest)
            {
                waiting.push_back(write);
                continue;
            }
            if write.begun.is_none() {
                if self.index.get(digest).is_some() {
                    let result = Err(TierError::AlreadyHeld { digest });
                    self.complete_write(&write.op, result, completions);
                    continue;
                }
                match self.make_room(&mut write, reserved, guard, completions) {
                    Room::Enough => {}
                    Room::Soon => {
                        waiting.push_back(write);
                        no_room = true;
                        continue;
                    }
                    Room::None => {
                        let capacity_bytes = self.config.capacity_bytes;
                        let result =
                            Err(TierError::NoSpace { wanted_bytes: reserved, capacity_bytes });
                        self.complete_write(&write.op, result, completions);
                        continue;
                    }
                }
                self.space.change_begins(Fan::of(digest), reserved);
            }
            self.send_write(write, digest, reserved, now_ns);
        }
        self.writes = waiting;
    }

    fn send_write(&mut self, write: QueuedWrite, digest: Digest, reserved: u64, now_ns: u64) {
        let key = self.next_key();
        let record = Arc::clone(&write.op.record);
        self.writing.insert(digest);
        let running = Running::Write { op: Some(write.op), digest, reserved, since_ns: now_ns };
        self.running.insert(key, running);
        if let Some((data, _)) = &mut self.lanes {
            data.send(key, Job::Write { record, begun: write.begun }, now_ns);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "an op and what became of it")]
    fn write_ended(
        &mut self,
        op: Option<WriteOp>,
        digest: Digest,
        reserved: u64,
        result: Result<Stored, TierError>,
        spent: Spent,
        now_ns: u64,
        completions: &mut Vec<Completion>,
    ) {
        self.stats.device_requests += spent.calls;
        self.detail.written_bytes += spent.written_bytes;
        self.detail.torn_removed += spent.torn_removed;
        self.writing.remove(&digest);
        let result = match (result, op.as_ref()) {
            (Ok(Stored::Paused(begun)), Some(_)) => {
                let Some(op) = op else { return };
                let begun = Some(begun);
                self.writes.push_front(QueuedWrite {
                    op,
                    begun,
                    since_ns: now_ns,
                    asked_round: None,
                });
                return;
            }
            (result, _) => result,
        };
        let published = matches!(result, Ok(Stored::Published));
        let added = if published { signed(reserved) } else { 0 };
        self.space.change_ends(Fan::of(digest), reserved, added);
        // One that failed by time before has no op: whoever looks for the chunk finds it.
        let Some(op) = op else { return };
        let round = self.space.rounds_begun;
        let result = match result {
            Ok(Stored::Published) => {
                let header = op.record.header();
                let held = crate::Held {
                    payload_bytes: header.payload_bytes(),
                    write_id: header.write_id(),
                };
                let touched_ns = Some(now_ns);
                self.index
                    .insert(digest, Entry { held, found: false, touched_ns, touched_round: round });
                Ok(())
            }
            Ok(Stored::Held(held)) => {
                self.detail.lost_races += u64::from(spent.written_bytes > 0);
                self.index.insert(
                    digest,
                    Entry { held, found: true, touched_ns: None, touched_round: 0 },
                );
                Err(TierError::AlreadyHeld { digest })
            }
            Ok(Stored::Occupied | Stored::Paused(_)) => Err(TierError::AlreadyHeld { digest }),
            Err(error) => Err(error),
        };
        self.complete_write(&op, result, completions);
    }

    pub(super) fn complete_write(
        &mut self,
        op: &WriteOp,
        result: Result<(), TierError>,
        completions: &mut Vec<Completion>,
    ) {
        self.ops -= 1;
        self.stats.count_write(op.record.header().payload_bytes(), &result);
        completions.push(Completion::Write { id: op.id, digest: op.record.digest(), result });
    }
}
