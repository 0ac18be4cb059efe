//! One tier under test: ops on it, each checked by the model when it ends.

use std::{collections::HashMap, ops::Range, sync::Arc};

use super::{
    Harness, Open, Outcome, Verdict,
    content::{Content, key},
    model::{Asked, Ended, Guard},
};
use crate::{
    Arena, Held, Located, Op, OpId, Purpose, ReadOp, Record, RejectReason, Rejected, Slot, Tier,
    WriteOp, record_bytes,
};

/// More polls than any wait needs: a tier that spins without progress in virtual time is caught by this.
const POLLS_MAX: u32 = 2_000_000;

pub(super) struct Case<'h, 'a> {
    harness: &'h mut Harness<'a>,
    pub(super) tier: Option<Box<dyn Tier>>,
    pub(super) now_ns: u64,
    pub(super) guard: Guard,
    pub(super) asked: HashMap<OpId, Asked>,
    pub(super) held: HashMap<u32, Content>,
    ops: u64,
    versions: u32,
    pub(super) evictions: u64,
}

impl<'h, 'a> Case<'h, 'a> {
    pub(super) fn open(harness: &'h mut Harness<'a>) -> Result<Self, String> {
        let now_ns = (harness.clock)(None);
        let tier = (harness.open)(Open::Fresh).map_err(|error| format!("open fresh: {error}"))?;
        let mut case = Self {
            harness,
            tier: Some(tier),
            now_ns,
            guard: Guard::default(),
            asked: HashMap::new(),
            held: HashMap::new(),
            ops: 0,
            versions: 0,
            evictions: 0,
        };
        case.compare()?;
        Ok(case)
    }

    /// Drops the tier and opens its store again.
    pub(super) fn reopen(&mut self) -> Result<(), String> {
        self.tier = None;
        self.asked.clear();
        self.guard = Guard::default();
        let tier = (self.harness.open)(Open::Reopen).map_err(|error| format!("reopen: {error}"))?;
        let shared = tier.capabilities().shared;
        self.tier = Some(tier);
        // A tier that others write into finds what it did not write itself when it is asked for.
        for number in self.held_numbers().into_iter().filter(|_| shared) {
            // It may have been evicted meanwhile.
            if self.locate(number)?.is_none() && self.holds(number).is_some() {
                return Err(format!("chunk {number} is not found after the restart"));
            }
        }
        Ok(())
    }

    /// Asks for a chunk until the answer is known.
    pub(super) fn locate(&mut self, number: u32) -> Result<Option<Held>, String> {
        let deadline_ns = self.now_ns.saturating_add(self.harness.wait_ns_max);
        for _ in 0..POLLS_MAX {
            let now_ns = self.now_ns;
            if now_ns > deadline_ns {
                break;
            }
            match self.tier()?.locate(key(number).digest(), now_ns) {
                Located::Held(held) => return Ok(Some(held)),
                Located::Absent => return Ok(None),
                Located::Asked => {}
            }
            let tier = self.tier.as_mut().ok_or("the tier is dropped")?;
            let mut completions = Vec::new();
            let next_ns = tier.poll(now_ns, &self.guard, &mut completions);
            for completion in completions {
                self.apply(completion)?;
            }
            self.pass_time(next_ns);
        }
        Err(format!("whether chunk {number} is there is never answered"))
    }

    /// The end of every rule: what is in flight ends, and the model is what the tier lists and returns.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        if self.tier.is_none() {
            return Ok(());
        }
        self.tier()?.hold_writes(false);
        self.settle()?;
        self.compare_list()
    }

    pub(super) fn drop_tier(&mut self) {
        self.tier = None;
        self.asked.clear();
    }

    pub(super) fn tier(&mut self) -> Result<&mut dyn Tier, String> {
        Ok(self.tier.as_mut().ok_or("the tier is dropped")?.as_mut())
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.harness.arena
    }

    /// Sizes that meet every boundary of header, padding and block.
    pub(super) fn sizes(&mut self) -> Result<Vec<u64>, String> {
        let mib = 1 << 20;
        let max = self.payload_bytes_max()?;
        let sizes = [0, 1, 4095, 4096, 4097, mib - 1, mib, mib + 1, 2 * mib, 2 * mib + 5, max];
        Ok(sizes.into_iter().filter(|&bytes| bytes <= max).collect())
    }

    /// The largest payload that the tier takes and a slot holds.
    pub(super) fn payload_bytes_max(&mut self) -> Result<u64, String> {
        let tier_max = self.tier()?.capabilities().payload_bytes_max;
        Ok(tier_max.min((2 << 20) + 5))
    }

    /// A content of chunk `number` that differs from all earlier ones.
    pub(super) fn content(&mut self, number: u32, payload_bytes: u64) -> Content {
        self.versions += 1;
        Content::new(number, self.versions, payload_bytes)
    }

    pub(super) fn slot(&mut self) -> Result<Slot, String> {
        loop {
            if let Some(slot) = self.harness.arena.try_take() {
                return Ok(slot);
            }
            if self.asked.is_empty() {
                return Err("no op is in flight, and the arena has no free slot".into());
            }
            self.step()?;
        }
    }

    pub(super) fn record(&mut self, content: Content) -> Result<Arc<Record>, String> {
        let slot = self.slot()?;
        Record::encode(slot, &content.key(), content.write_id(), &content.payload())
            .map(Arc::new)
            .map_err(|slot| format!("{content:?} does not fit a slot of {} bytes", slot.len()))
    }

    pub(super) fn next_id(&mut self) -> OpId {
        self.ops += 1;
        OpId(self.ops)
    }

    pub(super) fn read_op(&mut self, number: u32, blocks: Range<u32>, slot: Slot) -> Op {
        let id = self.next_id();
        Op::Read(ReadOp { id, digest: key(number).digest(), blocks, slot, purpose: Purpose::Use })
    }

    pub(super) fn write_op(&mut self, content: Content) -> Result<Op, String> {
        let record = self.record(content)?;
        Ok(Op::Write(WriteOp { id: self.next_id(), record }))
    }

    /// Submits once; on success the op is remembered. `number` is the chunk's.
    pub(super) fn try_submit(
        &mut self,
        number: u32,
        op: Op,
    ) -> Result<Result<(), Rejected>, String> {
        let id = op.id();
        let asked = match &op {
            Op::Read(read) => Asked::Read {
                number,
                blocks: read.blocks.clone(),
                must_find: self.held.contains_key(&number),
            },
            Op::Write(write) => {
                let content = Content::named(write.record.header().write_id(), number);
                Asked::Write { content: content.ok_or("the suite writes its own contents")? }
            }
        };
        let now_ns = self.now_ns;
        let submitted = self.tier()?.submit(op, now_ns);
        if submitted.is_ok() {
            self.asked.insert(id, asked);
        }
        self.compare()?;
        Ok(submitted)
    }

    /// Submits, polling as long as the queue is full. What completes meanwhile is checked and forgotten.
    pub(super) fn submit(&mut self, number: u32, mut op: Op) -> Result<(), String> {
        let deadline_ns = self.now_ns.saturating_add(self.harness.wait_ns_max);
        for _ in 0..POLLS_MAX {
            op = match self.try_submit(number, op)? {
                Ok(()) => return Ok(()),
                Err(Rejected { op, reason: RejectReason::QueueFull }) => op,
                Err(Rejected { reason, .. }) => {
                    return Err(format!("an op on chunk {number} was rejected: {reason:?}"));
                }
            };
            self.step()?;
            if self.now_ns > deadline_ns {
                break;
            }
        }
        Err("the queue stayed full".into())
    }

    pub(super) fn submit_write(&mut self, content: Content) -> Result<(), String> {
        let op = self.write_op(content)?;
        self.submit(content.number, op)
    }

    pub(super) fn submit_read(&mut self, number: u32, blocks: Range<u32>) -> Result<(), String> {
        let slot = self.slot()?;
        let op = self.read_op(number, blocks, slot);
        self.submit(number, op)
    }

    /// Writes chunk `number` and waits until it is readable.
    pub(super) fn write(&mut self, number: u32, payload_bytes: u64) -> Result<Content, String> {
        let content = self.content(number, payload_bytes);
        self.submit_write(content)?;
        let ended = self.settle()?;
        if ended.contains(&Ended::Written { content }) {
            return Ok(content);
        }
        Err(format!("{content:?} was not written: {ended:?}"))
    }

    /// Reads `blocks` of chunk `number`, which must be held, and waits for the (checked) bytes.
    pub(super) fn read(&mut self, number: u32, blocks: Range<u32>) -> Result<Content, String> {
        self.submit_read(number, blocks)?;
        for ended in self.settle()? {
            if let Ended::Read { number: read, found: Some(content) } = ended
                && read == number
            {
                return Ok(content);
            }
        }
        Err(format!("chunk {number} was not read"))
    }

    pub(super) fn remove(&mut self, number: u32) -> Result<bool, String> {
        let now_ns = self.now_ns;
        let removed = self.tier()?.remove(key(number).digest(), now_ns);
        for asked in self.asked.values_mut() {
            if let Asked::Read { number: read, must_find, .. } = asked
                && *read == number
            {
                *must_find = false;
            }
        }
        if removed != self.held.remove(&number).is_some() {
            return Err(format!("remove of chunk {number} said {removed}"));
        }
        self.compare()?;
        Ok(removed)
    }

    pub(super) fn holds(&self, number: u32) -> Option<Content> {
        self.held.get(&number).copied()
    }

    pub(super) fn held_numbers(&self) -> Vec<u32> {
        self.held.keys().copied().collect()
    }

    /// Polls until nothing is in flight.
    pub(super) fn settle(&mut self) -> Result<Vec<Ended>, String> {
        let deadline_ns = self.now_ns.saturating_add(self.harness.wait_ns_max);
        let mut ended = Vec::new();
        for _ in 0..POLLS_MAX {
            if self.asked.is_empty() {
                return Ok(ended);
            }
            ended.append(&mut self.step()?);
            if self.now_ns > deadline_ns {
                break;
            }
        }
        Err(format!("ops stayed in flight: {:?}", self.asked))
    }

    /// Polls once, then lets time pass if that brought nothing.
    pub(super) fn step(&mut self) -> Result<Vec<Ended>, String> {
        let (ended, next_ns) = self.poll()?;
        if ended.is_empty() && !self.asked.is_empty() {
            if next_ns.is_none() && self.tier()?.wake_fd().is_none() {
                let waiting = &self.asked;
                return Err(format!(
                    "poll says that time brings nothing, but pending: {waiting:?}"
                ));
            }
            self.pass_time(next_ns);
        }
        Ok(ended)
    }

    pub(super) fn pass_time(&mut self, until_ns: Option<u64>) {
        let now_ns = (self.harness.clock)(until_ns);
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Polls once and compares everything that can be seen with the model.
    pub(super) fn poll(&mut self) -> Result<(Vec<Ended>, Option<u64>), String> {
        let mut completions = Vec::new();
        let tier = self.tier.as_mut().ok_or("the tier is dropped")?;
        let next_ns = tier.poll(self.now_ns, &self.guard, &mut completions);
        let mut ended = Vec::new();
        for completion in completions {
            ended.extend(self.apply(completion)?);
        }
        if let Some(digest) = self.guard.confirmed.borrow().iter().next() {
            // The engine's directory has forgotten it: kept, it would take room that nobody can use.
            return Err(format!("{digest} was confirmed as a victim but not evicted"));
        }
        self.compare()?;
        Ok((ended, next_ns))
    }

    /// Reads every held chunk whole.
    pub(super) fn read_all(&mut self) -> Outcome {
        for number in self.held_numbers() {
            let content = self.read(number, 0..u32::MAX)?;
            if Some(content) != self.holds(number) {
                return Err(format!("chunk {number} was read as {content:?}"));
            }
        }
        Ok(Verdict::Holds)
    }

    /// Bytes that the readable chunks need at least.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held.values().map(|content| record_bytes(content.payload_bytes.into())).sum()
    }
}
