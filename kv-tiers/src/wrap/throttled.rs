//! Any tier at a given speed.

use std::{
    collections::HashMap,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kv_chunk::Digest;

use super::{
    Due, earlier,
    pace::{Delays, Device, ThrottleConfig},
};
use crate::{
    Capabilities, Completion, EvictionGuard, Held, ListCursor, Located, Op, OpId, ReadOp,
    RejectReason, Rejected, Tier, TierError, TierStats, WriteOp, record_bytes,
};

/// Slows any tier down to a [`ThrottleConfig`], in virtual or in real time.
///
/// The device is a queue: ops overlap, their bytes are served in order at the rate (reads and writes together), then
/// each takes its latency. Reads go to the inner tier at once, and their completions are held until due; a write goes to
/// the inner tier when due, so that it cannot be seen earlier. An inner tier that is slower than that stays slower.
#[derive(Debug)]
pub struct Throttled {
    inner: Box<dyn Tier>,
    device: Device<Job>,
    delays: Delays,
    handle: ThrottleHandle,
    /// Accepted and not completed: reads by id; the inner tier has their slots.
    reads: HashMap<OpId, PacedRead>,
    /// Reads that are done and not due.
    done: Due<Completion>,
    /// Writes that are served and not due.
    writes: Due<WriteOp>,
    /// Accepted and not completed.
    in_flight: usize,
    in_flight_max: usize,
    /// Of those, writes that the inner tier does not have yet.
    writes_waiting: usize,
    closed: bool,
    scratch: Vec<Completion>,
}

#[derive(Debug)]
enum Job {
    Read { id: OpId, delay_ns: u64 },
    Write { op: WriteOp, delay_ns: u64 },
}

#[derive(Debug, Default)]
struct PacedRead {
    due_ns: Option<u64>,
    completion: Option<Completion>,
}

/// Changes the rate of a [`Throttled`] tier while it runs.
#[derive(Clone, Debug)]
pub struct ThrottleHandle {
    /// Written by any holder, read by the tier's thread; it stands alone, so relaxed.
    bytes_per_s: Arc<AtomicU64>,
}

impl ThrottleHandle {
    /// The rate.
    pub fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s.load(Ordering::Relaxed)
    }

    /// Another rate (at least 1), from the tier's next `submit` or `poll` on.
    pub fn set_bytes_per_s(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s.max(1), Ordering::Relaxed);
    }
}

impl Throttled {
    /// Paces `inner`.
    pub fn new(inner: Box<dyn Tier>, config: ThrottleConfig) -> Self {
        let bytes_per_s = Arc::new(AtomicU64::new(config.bytes_per_s.max(1)));
        Self {
            inner,
            device: Device::new(&config),
            delays: Delays::new(&config),
            handle: ThrottleHandle { bytes_per_s },
            reads: HashMap::new(),
            done: Due::default(),
            writes: Due::default(),
            in_flight: 0,
            in_flight_max: 0,
            writes_waiting: 0,
            closed: false,
            scratch: Vec::new(),
        }
    }

    /// Changes the rate later.
    pub fn handle(&self) -> ThrottleHandle {
        self.handle.clone()
    }

    fn accept_read(&mut self, op: ReadOp, now_ns: u64) -> Result<(), Rejected> {
        let ReadOp { id, digest, .. } = op;
        // A chunk that is not held moves no bytes.
        let held = self.inner.contains(digest);
        let bytes = held.map_or(0, |held| op.bytes_in_slot(held.payload_bytes));
        self.inner.submit(Op::Read(op), now_ns)?;
        self.reads.insert(id, PacedRead::default());
        let delay_ns = self.delays.draw_ns();
        self.device.push(bytes, false, Job::Read { id, delay_ns });
        Ok(())
    }

    fn accept_write(&mut self, op: WriteOp) -> Result<(), Rejected> {
        let payload_bytes = op.record.header().payload_bytes();
        let bytes = record_bytes(payload_bytes);
        if payload_bytes > self.inner.capabilities().payload_bytes_max
            || bytes > self.inner.stats().capacity_bytes
        {
            return Err(Rejected { op: Op::Write(op), reason: RejectReason::TooLarge });
        }
        let delay_ns = self.delays.draw_ns();
        self.device.push(bytes, true, Job::Write { op, delay_ns });
        self.writes_waiting += 1;
        Ok(())
    }

    fn serve(&mut self, now_ns: u64) {
        let Self { device, reads, done, writes, .. } = self;
        device.serve(now_ns, |end_ns, job| match job {
            Job::Write { op, delay_ns } => writes.push(end_ns.saturating_add(delay_ns), op),
            Job::Read { id, delay_ns } => {
                let due_ns = end_ns.saturating_add(delay_ns);
                let read = reads.entry(id).or_default();
                read.due_ns = Some(due_ns);
                if let Some(completion) = read.completion.take() {
                    reads.remove(&id);
                    done.push(due_ns, completion);
                }
            }
        });
        device.set_rate(self.handle.bytes_per_s());
    }

    /// Gives the inner tier the writes that are due.
    fn forward_writes(&mut self, now_ns: u64, completions: &mut Vec<Completion>) {
        while let Some(op) = self.writes.pop(now_ns) {
            self.writes_waiting -= 1;
            let (id, digest) = (op.id, op.record.digest());
            let Err(rejected) = self.inner.submit(Op::Write(op), now_ns) else { continue };
            match (rejected.reason, rejected.op) {
                (RejectReason::QueueFull, Op::Write(op)) => {
                    // At the next poll: the inner tier has completions to give first.
                    self.writes_waiting += 1;
                    self.writes.push(now_ns, op);
                    return;
                }
                (RejectReason::TooLarge, _) => {
                    let stats = self.inner.stats();
                    let wanted_bytes = stats.capacity_bytes.saturating_add(1);
                    let error =
                        TierError::NoSpace { wanted_bytes, capacity_bytes: stats.capacity_bytes };
                    self.complete(
                        Completion::Write { id, digest, result: Err(error) },
                        completions,
                    );
                }
                _ => {
                    let error = TierError::Closed { tier: self.inner.name().into() };
                    self.complete(
                        Completion::Write { id, digest, result: Err(error) },
                        completions,
                    );
                }
            }
        }
        if self.closed && self.writes_waiting == 0 {
            self.inner.close();
        }
    }

    fn complete(&mut self, completion: Completion, completions: &mut Vec<Completion>) {
        self.in_flight -= 1;
        completions.push(completion);
    }

    /// Takes what the inner tier completed: reads wait until they are due.
    fn collect(&mut self, completions: &mut Vec<Completion>) {
        for completion in std::mem::take(&mut self.scratch) {
            match completion {
                Completion::Read { id, .. } => match self.reads.remove(&id) {
                    Some(PacedRead { due_ns: Some(due_ns), .. }) => {
                        self.done.push(due_ns, completion);
                    }
                    _ => {
                        let waiting = PacedRead { due_ns: None, completion: Some(completion) };
                        self.reads.insert(id, waiting);
                    }
                },
                Completion::Write { .. } => self.complete(completion, completions),
                Completion::Evicted { .. } | Completion::Lost { .. } => {
                    completions.push(completion);
                }
            }
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Throttled {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        self.serve(now_ns);
        if self.closed {
            return Err(Rejected { op, reason: RejectReason::Closed });
        }
        if self.in_flight >= self.inner.capabilities().queue_ops_max as usize {
            return Err(Rejected { op, reason: RejectReason::QueueFull });
        }
        match op {
            Op::Read(read) => self.accept_read(read, now_ns)?,
            Op::Write(write) => self.accept_write(write)?,
        }
        self.in_flight += 1;
        self.in_flight_max = self.in_flight_max.max(self.in_flight);
        Ok(())
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        self.serve(now_ns);
        self.forward_writes(now_ns, completions);
        let inner_ns = self.inner.poll(now_ns, guard, &mut self.scratch);
        self.collect(completions);
        while let Some(completion) = self.done.pop(now_ns) {
            self.complete(completion, completions);
        }
        let due_ns = earlier(self.done.next_ns(), self.writes.next_ns());
        earlier(earlier(self.device.next_end_ns(), due_ns), inner_ns)
    }

    fn hold_writes(&mut self, hold: bool) {
        // No clock here: the change counts from the last `submit` or `poll` on.
        self.device.hold_writes = hold;
        self.inner.hold_writes(hold);
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        self.inner.contains(digest)
    }

    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        self.inner.locate(digest, now_ns)
    }

    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool {
        self.inner.remove(digest, now_ns)
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        self.inner.list(visit);
    }

    fn list_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        self.inner.list_from(from, max, visit)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn stats(&self) -> TierStats {
        let in_flight_max = u32::try_from(self.in_flight_max).unwrap_or(u32::MAX);
        TierStats { in_flight_max, ..self.inner.stats() }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn close(&mut self) {
        self.closed = true;
        if self.writes_waiting == 0 {
            self.inner.close();
        }
    }
}
