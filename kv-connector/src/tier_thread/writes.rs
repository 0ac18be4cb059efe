//! Writes of one tier: staged chunks become ops when the gate lets them.

use kv_tiers::{ErrorKind, Op, OpId, RejectReason, Rejected, TierError, WriteOp};
use kv_writeback::{Next, Written};

use super::Worker;
use crate::{Event, clock::ns_from_ms};

/// Failures in a row after which a tier's queue is taken away instead of only delayed.
const FAILURES_MAX: u32 = 3;

/// Rest after a tier had no room or failed to write.
#[derive(Debug, Default)]
pub(super) struct WritePause {
    until_ns: Option<u64>,
    failures: u32,
    /// The queue was taken away.
    stopped: bool,
}

impl WritePause {
    pub(super) fn is_paused(&self) -> bool {
        self.until_ns.is_some()
    }
}

/// What a turn of writing did.
pub(super) struct WriteTurn {
    /// Something was submitted.
    pub(super) started: bool,
    /// When to look again.
    pub(super) wake_ns: Option<u64>,
}

impl Worker {
    pub(super) fn run_writes(&mut self, now_ns: u64) -> WriteTurn {
        self.hold_or_release_writes(now_ns);
        let mut turn = WriteTurn { started: false, wake_ns: None };
        if self.gone || !self.handle().is_readable() {
            return turn;
        }
        if let Some(until_ns) = self.pause.until_ns {
            if now_ns < until_ns {
                turn.wake_ns = Some(until_ns);
                return turn;
            }
            self.end_pause();
        }
        while self.writes.len() < self.handle().write_window as usize && !self.pause.is_paused() {
            match self.shared.writeback.next(self.id.0, now_ns) {
                Next::Write(record) => {
                    if !self.submit_write(record, now_ns) {
                        break;
                    }
                    turn.started = true;
                }
                Next::Wait { until_ns } => {
                    turn.wake_ns = Some(until_ns);
                    break;
                }
                Next::Idle => break,
            }
        }
        turn
    }

    /// A closed gate also pauses writes that are half done.
    fn hold_or_release_writes(&mut self, now_ns: u64) {
        if self.writes.is_empty() && !self.holding_writes {
            return;
        }
        let hold = !self.writes.is_empty() && !self.shared.writeback.may_write(self.id.0, now_ns);
        if hold != self.holding_writes {
            self.holding_writes = hold;
            self.tier.hold_writes(hold);
        }
    }

    fn submit_write(&mut self, record: std::sync::Arc<kv_tiers::Record>, now_ns: u64) -> bool {
        let (digest, write_id) = (record.digest(), record.header().write_id());
        let id = self.next_id();
        let op = WriteOp { id: OpId(id), record };
        let Err(Rejected { reason, .. }) = self.tier.submit(Op::Write(op), now_ns) else {
            self.writes.insert(id, (digest, write_id));
            return true;
        };
        match reason {
            RejectReason::QueueFull => {
                self.shared.writeback.requeue(self.id.0, digest, write_id);
                false
            }
            RejectReason::TooLarge => {
                let outcome = Written::Failed;
                self.shared.writeback.finish(self.id.0, digest, write_id, outcome);
                true
            }
            _ => {
                self.shared.writeback.requeue(self.id.0, digest, write_id);
                self.lose_tier();
                false
            }
        }
    }

    pub(super) fn write_completed(&mut self, id: OpId, result: Result<(), TierError>, now_ns: u64) {
        let Some((digest, write_id)) = self.writes.remove(&id.0) else { return };
        let outcome = match &result {
            Ok(()) => Written::Done,
            Err(error) if error.kind() == ErrorKind::AlreadyHeld => Written::AlreadyHeld,
            Err(_) => Written::Failed,
        };
        match (&result, outcome) {
            (Err(error), Written::Failed) => self.write_failed(error, now_ns),
            _ => {
                self.pause.failures = 0;
                // Evicted within the same poll, it must not be named.
                if self.tier.contains(digest).is_some() && !self.gone {
                    self.shared.directory.set(digest, self.id.0);
                    if outcome == Written::Done {
                        self.shared.tell(Event::Published { digest, tier: self.id.0 });
                    }
                }
            }
        }
        self.shared.writeback.finish(self.id.0, digest, write_id, outcome);
    }

    /// Reads go on. Writes rest, at once where there was no room; after some failures in a row the queue is taken away
    /// for that time.
    fn write_failed(&mut self, error: &TierError, now_ns: u64) {
        tracing::debug!(tier = self.handle().name, %error, "write failed");
        self.handle().counters.count_error("write", error);
        if error.kind() == ErrorKind::Closed {
            return;
        }
        self.pause.failures += 1;
        let no_room = error.kind() == ErrorKind::NoSpace;
        if !no_room && self.pause.failures < FAILURES_MAX {
            return;
        }
        let rest_ns = ns_from_ms(self.shared.config.write_back_off_ms);
        self.pause.until_ns = Some(now_ns.saturating_add(rest_ns));
        if self.pause.failures >= FAILURES_MAX && !self.pause.stopped {
            tracing::warn!(tier = self.handle().name, %error, "writes stop");
            self.pause.stopped = true;
            self.shared.writeback.stop_writes(self.id.0);
        }
    }

    fn end_pause(&mut self) {
        self.pause.until_ns = None;
        if std::mem::take(&mut self.pause.stopped) {
            self.shared.writeback.tier_back(self.id.0);
        }
    }
}
