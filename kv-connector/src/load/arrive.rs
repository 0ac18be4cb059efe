//! What arrives while a load runs: verified pieces are copied out at once, so that their slots serve the next reads.

use std::{
    sync::{Arc, mpsc::TryRecvError},
    time::Instant,
};

use kv_chunk::WriteId;
use kv_tiers::{Piece, Record};

use super::{Arrived, Load, Running, plan::miss_reason};
use crate::{
    MissReason, Outcome, Source, Want,
    clock::{now_ns, seconds},
    step::Message,
};

impl Load<'_, '_> {
    pub(super) fn take_record(&mut self, group: usize, source: Source, record: &Arc<Record>) {
        let payload = record.payload();
        self.report.memory_bytes += self.copy(group, 0, payload, payload.len());
        if self.is_handed(group, payload.len()) {
            self.report.memory_bytes += payload.len() as u64;
            (self.taker)(&self.takers, Arrived::record(Arc::clone(record)));
        }
        self.deliver(group, source, payload.len());
    }

    /// Copies what has arrived by now.
    pub(super) fn take_arrived(&mut self, running: &Running<'_>) {
        while let Ok(message) = running.messages.try_recv() {
            self.take(message, running);
        }
    }

    /// Copies what arrives until every chunk has an outcome or the deadline passes; then the rest are misses.
    pub(super) fn finish_reads(&mut self, running: &Running<'_>, deadline: Instant) {
        while self.open > 0 {
            // Time that would be spent waiting goes into the host cache.
            let message = match running.messages.try_recv() {
                Err(TryRecvError::Empty) => {
                    if let Some((group, write_id)) = self.to_keep.pop() {
                        self.keep_pieces(group, write_id);
                        continue;
                    }
                    let left = deadline.saturating_duration_since(Instant::now());
                    running.messages.recv_timeout(left).ok()
                }
                received => received.ok(),
            };
            let Some(message) = message else { break };
            self.take(message, running);
        }
        if self.open > 0 {
            tracing::warn!(chunks = self.open, "step deadline passed");
            let _ = running.step.0.pool.cancel();
            self.take_arrived(running);
            for &group in &running.groups {
                self.miss(group, MissReason::StepDeadline);
            }
        }
        for (group, write_id) in std::mem::take(&mut self.to_keep) {
            self.keep_pieces(group, write_id);
        }
        self.report_reads(running);
    }

    fn take(&mut self, message: Message, running: &Running<'_>) {
        let missed = |chunk: usize| {
            let chunk = u32::try_from(chunk).ok()?;
            miss_reason(running.step.0.pool.status(chunk))
        };
        match message {
            Message::Piece { chunk, tier, attempt, new_bytes, piece } => {
                let group = running.groups[chunk as usize];
                self.take_piece(group, Source::Tier(tier), (attempt, new_bytes), piece);
            }
            Message::Missed { chunk } => {
                let reason = missed(chunk as usize).unwrap_or(MissReason::Io);
                self.miss(running.groups[chunk as usize], reason);
            }
            Message::Look => {
                for (chunk, &group) in running.groups.iter().enumerate() {
                    if let Some(reason) = missed(chunk) {
                        self.miss(group, reason);
                    }
                }
            }
        }
    }

    fn take_piece(
        &mut self,
        index: usize,
        source: Source,
        (attempt, new_bytes): (u8, u64),
        piece: Piece,
    ) {
        let payload_len = usize::try_from(piece.chunk_payload_bytes()).unwrap_or(usize::MAX);
        let offset = usize::try_from(piece.payload_offset()).unwrap_or(usize::MAX);
        let whole = piece.bytes().len() == payload_len;
        let group = &mut self.groups[index];
        // A message of an earlier attempt can come late: its bytes may be of another staging.
        if !group.open || attempt < group.attempt {
            return;
        }
        if attempt > group.attempt {
            group.attempt = attempt;
            group.received_bytes = 0;
        }
        // Pieces were planned from the destination's length: of another chunk they are not all of it.
        if !whole && self.wants[group.wants[0]].payload_bytes() != payload_len {
            self.miss(index, MissReason::WrongLength);
            return;
        }
        // Reads overlap where duplicates are smaller: what counts is what is new. A whole chunk is
        // all of it, and replaces what came before.
        group.received_bytes += new_bytes;
        let done = whole || group.received_bytes == payload_len as u64;
        self.copy(index, offset, piece.bytes(), payload_len);
        let write_id = piece.write_id();
        let handed = self.is_handed(index, payload_len);
        if handed {
            self.hand_over(piece);
        } else if whole {
            if let Some(record) = piece.into_record() {
                self.shared.keep_read(Arc::new(record));
            }
        } else {
            drop(piece);
            if done && self.shared.cache.capacity() > 0 {
                self.to_keep.push((index, write_id));
            }
        }
        if done {
            self.report.storage_bytes += payload_len as u64;
            self.deliver(index, source, payload_len);
        }
    }

    /// Whether somebody takes the bytes of this chunk as they are; `self.takers` says who.
    fn is_handed(&mut self, group: usize, payload_len: usize) -> bool {
        let takes = |want: &Want<'_>| want.is_handed() && want.payload_bytes() == payload_len;
        let wants = self.groups[group].wants.iter().copied();
        self.takers.clear();
        self.takers.extend(wants.filter(|&want| takes(&self.wants[want])));
        !self.takers.is_empty()
    }

    /// A whole chunk is also kept in memory, if chunks are.
    fn hand_over(&mut self, piece: Piece) {
        let arrived = if piece.bytes().len() as u64 == piece.chunk_payload_bytes() {
            let Some(record) = piece.into_record().map(Arc::new) else { return };
            self.shared.keep_read(Arc::clone(&record));
            Arrived::record(record)
        } else {
            Arrived::piece(piece)
        };
        (self.taker)(&self.takers, arrived);
    }

    /// Copies bytes of a payload to every destination that is as long as the payload.
    fn copy(&mut self, group: usize, offset: usize, bytes: &[u8], payload_len: usize) -> u64 {
        let mut copied = 0;
        for &want in &self.groups[group].wants {
            let want = &mut self.wants[want];
            if want.is_handed() || want.dest.len() != payload_len {
                continue;
            }
            let dest = &mut *want.dest;
            if let Some(dest) = dest.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes.len()))
            {
                dest.copy_from_slice(bytes);
                copied += bytes.len() as u64;
            }
        }
        copied
    }

    /// All bytes are copied: hits, but for destinations of another length.
    fn deliver(&mut self, group: usize, source: Source, payload_len: usize) {
        let group = &mut self.groups[group];
        if !std::mem::take(&mut group.open) {
            return;
        }
        self.open -= 1;
        for &want in &group.wants {
            let want = &mut self.wants[want];
            want.outcome = if want.payload_bytes() == payload_len {
                Outcome::Hit(source)
            } else {
                Outcome::Miss(MissReason::WrongLength)
            };
        }
    }

    /// Puts a chunk that came in pieces together again, from its destination, for the host cache.
    fn keep_pieces(&mut self, group: usize, write_id: WriteId) {
        let want = &self.wants[self.groups[group].wants[0]];
        let Some(slot) = self.shared.read_slot().filter(|_| want.outcome.is_hit()) else { return };
        if let Ok(record) = Record::encode(slot, want.key, write_id, want.dest) {
            self.shared.keep_read(Arc::new(record));
        }
    }

    fn report_reads(&mut self, running: &Running<'_>) {
        let now_ns = now_ns();
        let step = &running.step.0;
        let pool = step.pool.report();
        for (index, (tier, counted)) in self.report.tiers.iter_mut().zip(&pool.tiers).enumerate() {
            tier.payload_bytes = counted.bytes;
            tier.late_bytes = counted.late_bytes;
            tier.failed_reads = counted.all_failures();
            tier.mixed_pieces = counted.mixed;
            tier.busy_s = seconds(step.busy_ns(index, now_ns));
        }
        self.report.duplicate_bytes = pool.duplicate_bytes();
        let rates: Option<Vec<u64>> =
            self.shared.tiers.iter().map(|tier| tier.alone_bytes_per_s).collect();
        self.report.bound_s = rates.and_then(|rates| step.pool.bound_ns(&rates)).map(seconds);
    }
}
