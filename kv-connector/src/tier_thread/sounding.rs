//! Reading on trial while nobody wants anything: about how many reads in flight the tier needs. After open, or, of a tier
//! that was opened empty, once it holds enough.
//!
//! Only chunks that were written are read (what was merely allocated comes at the speed of memory), chosen at random; their
//! bytes go nowhere. The first step, write or failure ends it, and it is short in any case.

use std::collections::HashSet;

use kv_chunk::Digest;
use kv_router::{BreakerState, KneeProbe};
use kv_tiers::{ListCursor, Op, OpId, Purpose, ReadDone, ReadOp, TierError};

use super::Worker;
use crate::{WindowProbe, clock::seconds};

const BYTES_MAX: u64 = 512 << 20;
const NS_MAX: u64 = 500_000_000;
/// Chunks to choose from; a longer probe reads some of them again.
const CHUNKS_MAX: usize = 512;
/// Of a tier that was opened empty: it holds so many of its largest windows, so that no chunk is read twice,
const FULL_WINDOWS: u64 = 4;
/// and nobody has wanted anything for so long, so that hardly a step comes in between.
const QUIET_NS: u64 = 1_000_000_000;

/// Reading on trial, and what came of it.
#[derive(Debug, Default)]
pub(super) struct Sounding {
    running: Option<Running>,
    /// The tier was opened empty, and has not been read on trial yet.
    later: bool,
    /// Since when nobody has wanted anything.
    quiet_since_ns: Option<u64>,
    /// Reads in flight, also after it was stopped. They have no place in the window: nobody waits for them.
    in_flight: HashSet<u64>,
    pub(super) found: Option<WindowProbe>,
}

#[derive(Debug)]
struct Running {
    probe: KneeProbe,
    /// In random order.
    chunks: Vec<Digest>,
    next: usize,
    /// None until the first read.
    started_ns: Option<u64>,
    reads: u64,
    bytes: u64,
}

/// Some chunks of a tier, each equally likely: taken while its chunks are gone through anyway.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    chunks: Vec<Digest>,
    seen: usize,
}

impl Sample {
    pub(crate) fn offer(&mut self, digest: Digest) {
        self.seen += 1;
        if self.chunks.len() < CHUNKS_MAX {
            self.chunks.push(digest);
        } else if let Some(place) = self.chunks.get_mut(fastrand::usize(..self.seen)) {
            *place = digest;
        }
    }
}

impl Sounding {
    /// Of a tier that was just opened. With nothing written there is nothing to learn from yet.
    pub(super) fn new(sample: Sample, window_max: u32) -> Self {
        if sample.chunks.is_empty() {
            return Self { later: true, ..Self::default() };
        }
        Self { running: Some(Running::new(sample.chunks, window_max)), ..Self::default() }
    }

    pub(super) fn is_over(&self) -> bool {
        self.running.is_none() && self.in_flight.is_empty()
    }
}

impl Running {
    fn new(mut chunks: Vec<Digest>, window_max: u32) -> Self {
        fastrand::shuffle(&mut chunks);
        let probe = KneeProbe::new(window_max);
        Self { probe, chunks, next: 0, started_ns: None, reads: 0, bytes: 0 }
    }
}

impl Worker {
    /// Keeps the probe's reads in flight. True if any was submitted.
    pub(super) fn sound(&mut self, now_ns: u64) -> bool {
        if self.sounding.later {
            self.sound_later(now_ns);
        }
        if self.sounding.running.is_none() {
            return false;
        }
        if let Some(why) = self.why_no_sounding(now_ns) {
            self.end_sounding(why, now_ns);
            return false;
        }
        let mut submitted = false;
        while let Some((id, op)) = self.next_sounding_read(now_ns) {
            let Some(op) = op else {
                self.end_sounding("memory", now_ns);
                return submitted;
            };
            if self.tier.submit(Op::Read(op), now_ns).is_err() {
                self.end_sounding("failure", now_ns);
                return submitted;
            }
            self.sounding.in_flight.insert(id);
            submitted = true;
        }
        submitted
    }

    /// Begins, once, if it is time. The thread looks every second at least. Only where reads come from the device: what was
    /// written a moment ago comes from the system's memory else.
    fn sound_later(&mut self, now_ns: u64) {
        if !self.is_idle() || !self.chores.is_idle() || !self.shared.writeback.is_drained() {
            self.sounding.quiet_since_ns = None;
            return;
        }
        let since_ns = *self.sounding.quiet_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) < QUIET_NS {
            return;
        }
        let stats = self.tier.stats();
        let window_max = self.depth.max();
        if stats.chunks < FULL_WINDOWS * u64::from(window_max) {
            return;
        }
        self.sounding.later = false;
        if !stats.io_mode.direct || self.depth.is_settled() {
            return;
        }
        let mut chunks = Vec::new();
        let mut take = |digest, _| chunks.push(digest);
        self.tier.list_from(ListCursor::START, CHUNKS_MAX, &mut take);
        if !chunks.is_empty() {
            self.sounding.running = Some(Running::new(chunks, window_max));
        }
    }

    fn why_no_sounding(&mut self, now_ns: u64) -> Option<&'static str> {
        let steps = !self.queue.is_idle() || !self.reads.is_empty();
        let writes = !self.writes.is_empty();
        let failed = self.gone || self.breaker.state(now_ns) != BreakerState::Closed;
        let running = self.sounding.running.as_ref()?;
        let late = running.started_ns.is_some_and(|at_ns| now_ns.saturating_sub(at_ns) >= NS_MAX);
        [
            (steps, "step"),
            (writes, "write"),
            (!self.chores.is_idle(), "purge"),
            (failed, "failure"),
            (running.probe.is_finished(), "enough"),
            (late, "time"),
            (running.bytes >= BYTES_MAX, "bytes"),
        ]
        .into_iter()
        .find_map(|(ends, why)| ends.then_some(why))
    }

    /// The next read if there is a place for one; without its op if there is no memory.
    fn next_sounding_read(&mut self, now_ns: u64) -> Option<(u64, Option<ReadOp>)> {
        let id = self.next_id();
        let in_flight = u32::try_from(self.sounding.in_flight.len()).unwrap_or(u32::MAX);
        let running = self.sounding.running.as_mut()?;
        if in_flight >= running.probe.limit() {
            running.probe.refilled(in_flight);
            return None;
        }
        running.started_ns.get_or_insert(now_ns);
        let digest = running.chunks[running.next % running.chunks.len()];
        running.next += 1;
        let slot = self.shared.arenas.reads.try_take();
        Some((
            id,
            slot.map(|slot| ReadOp {
                id: OpId(id),
                digest,
                blocks: 0..u32::MAX,
                slot,
                purpose: Purpose::Look,
            }),
        ))
    }

    /// True if the read was one of the probe's.
    pub(super) fn sounding_read_completed(
        &mut self,
        id: OpId,
        result: &Result<ReadDone, TierError>,
        now_ns: u64,
    ) -> bool {
        if !self.sounding.in_flight.remove(&id.0) {
            return false;
        }
        match (&mut self.sounding.running, result) {
            (Some(running), Ok(done)) => {
                running.reads += 1;
                running.bytes += done.payload_bytes as u64;
                running.probe.completed(done.payload_bytes as u64, now_ns);
            }
            // Whether the tier fails is for real reads to find out.
            (Some(_), Err(_)) => self.end_sounding("failure", now_ns),
            (None, _) => {}
        }
        true
    }

    fn end_sounding(&mut self, ended_by: &'static str, now_ns: u64) {
        let Some(running) = self.sounding.running.take() else { return };
        let window = running.probe.window();
        let ns = running.started_ns.map_or(0, |at_ns| now_ns.saturating_sub(at_ns));
        let Running { reads, bytes, .. } = running;
        tracing::info!(tier = self.handle().name, ?window, reads, bytes, ended_by, "window probed");
        self.sounding.found =
            Some(WindowProbe { window, reads, bytes, seconds: seconds(ns), ended_by });
        // Stopped early, it saw at least that much to be of use.
        let start = self.handle().windows.start;
        if let Some(window) = window {
            let seen_all = ended_by == "enough";
            self.start_window_at(if seen_all { window } else { window.max(start) });
        }
    }

    /// When the probe must be looked at.
    pub(super) fn sounding_ns(&self) -> Option<u64> {
        let started_ns = self.sounding.running.as_ref()?.started_ns?;
        Some(started_ns.saturating_add(NS_MAX))
    }
}
