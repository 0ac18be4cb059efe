//! When will a claim's data be wanted?

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use crate::ClaimId;

/// Estimates the time until a request's retrieval starts.
///
/// # Contract
/// * The estimate is for *this* claim's retrieval, as if its own data were ready: staging is the other estimator's.
/// * Use begins when the **first** of several slots frees up, so the mean of each slot's remaining time is biased
///   late, and late is what costs latency: give a lower quantile. An early estimate costs only protected bytes.
/// * Running and queued work count on one timeline.
/// * 0 means now or overdue. `None` means that nothing is known (the request is not queued): policies then wait for
///   the retrieval request.
/// * Asking changes nothing, and asking twice at one `now_ns` gives the same answer.
pub trait TimeToUse {
    /// Nanoseconds from `now_ns` until `claim`'s retrieval starts.
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64>;

    /// How likely `claim`'s retrieval starts within `within_ns` from `now_ns`, in thousandths; `None` if nothing is
    /// known. An estimator of one figure is certain of it.
    fn use_chance_permille(&self, claim: ClaimId, within_ns: u64, now_ns: u64) -> Option<u32> {
        let time_to_use_ns = self.time_to_use_ns(claim, now_ns)?;
        Some(if time_to_use_ns <= within_ns { 1000 } else { 0 })
    }
}

/// Options of [`SlotProjection`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProjectionOptions {
    /// Requests that run at once; at least 1 is assumed.
    pub slots: usize,
    /// Which quantile of the projected times is the answer, 1 to 100.
    pub quantile_percent: u32,
    /// Projections per question, at least 1.
    pub scenarios: u32,
    /// Finished requests remembered.
    pub history_len: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl ProjectionOptions {
    /// Defaults: the 30 % quantile of 16 scenarios, 256 requests remembered.
    pub const fn new(slots: usize) -> Self {
        Self { slots, quantile_percent: 30, scenarios: 16, history_len: 256, seed: 0 }
    }
}

/// Projects running and queued requests, first come first served, over a number of slots.
///
/// A request's service time is a known part, calibrated by the caller (its prefill), and an unknown part (its output)
/// that is drawn from the requests that have finished; of a running one only from those that lasted longer than it has.
/// Before any request has finished the unknown part is 0, so the estimate is early.
#[derive(Clone, Debug)]
pub struct SlotProjection {
    options: ProjectionOptions,
    running: Vec<Running>,
    queue: VecDeque<Queued>,
    /// Unknown parts of finished requests, in order of finishing and sorted.
    history: VecDeque<u64>,
    sorted: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    claim: ClaimId,
    known_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    work: Queued,
    started_ns: u64,
}

impl SlotProjection {
    /// No requests yet.
    pub fn new(options: ProjectionOptions) -> Self {
        Self {
            options,
            running: Vec::new(),
            queue: VecDeque::new(),
            history: VecDeque::new(),
            sorted: Vec::new(),
        }
    }

    /// `claim`'s request joins the end of the queue; `known_ns` of its service time are known.
    pub fn enqueue(&mut self, claim: ClaimId, known_ns: u64) {
        self.queue.push_back(Queued { claim, known_ns });
    }

    /// `claim`'s request leaves the queue, wherever it stood, and takes a slot. An unknown one is ignored.
    pub fn start(&mut self, claim: ClaimId, now_ns: u64) {
        if let Some(work) = self.position(claim).and_then(|at| self.queue.remove(at)) {
            self.running.push(Running { work, started_ns: now_ns });
        }
    }

    /// `claim`'s running request is done; what it took beyond its known part is remembered.
    pub fn finish(&mut self, claim: ClaimId, now_ns: u64) {
        let Some(at) = self.running.iter().position(|running| running.work.claim == claim) else {
            return;
        };
        let Running { work, started_ns } = self.running.swap_remove(at);
        let unknown_ns = now_ns.saturating_sub(started_ns).saturating_sub(work.known_ns);
        self.history.push_back(unknown_ns);
        self.sorted.insert(self.sorted.partition_point(|&sample| sample < unknown_ns), unknown_ns);
        if self.history.len() > self.options.history_len {
            let oldest = self.history.pop_front().expect("it is not empty");
            self.sorted.remove(self.sorted.partition_point(|&sample| sample < oldest));
        }
    }

    /// `claim`'s request is gone, queued or running; nothing is learnt from it.
    pub fn remove(&mut self, claim: ClaimId) {
        self.queue.retain(|queued| queued.claim != claim);
        self.running.retain(|running| running.work.claim != claim);
    }

    fn position(&self, claim: ClaimId) -> Option<usize> {
        self.queue.iter().position(|queued| queued.claim == claim)
    }

    /// When the slot for the request behind the first `ahead` of the queue is free, from `now_ns`.
    fn project(&self, ahead: usize, scenario: u32, now_ns: u64) -> u64 {
        let slots = self.options.slots.max(1);
        let mut free: BinaryHeap<Reverse<u64>> =
            self.running.iter().map(|r| Reverse(self.residual(r, scenario, now_ns))).collect();
        free.extend((self.running.len()..slots).map(|_| Reverse(0)));
        // More requests run than there are slots: the queue waits until enough of them are gone.
        for _ in slots..self.running.len() {
            free.pop();
        }
        for work in self.queue.iter().take(ahead) {
            let Reverse(start) = free.pop().expect("there is a slot");
            let service_ns =
                work.known_ns.saturating_add(self.draw(work.claim, scenario, 0).unwrap_or(0));
            free.push(Reverse(start.saturating_add(service_ns)));
        }
        free.pop().map_or(0, |Reverse(start)| start)
    }

    fn residual(&self, running: &Running, scenario: u32, now_ns: u64) -> u64 {
        let age_ns = now_ns.saturating_sub(running.started_ns);
        let Some(unknown_age_ns) = age_ns.checked_sub(running.work.known_ns) else {
            let unknown_ns = self.draw(running.work.claim, scenario, 0).unwrap_or(0);
            return (running.work.known_ns - age_ns).saturating_add(unknown_ns);
        };
        // Older than anything seen: it may end any moment.
        let drawn = self.draw(running.work.claim, scenario, unknown_age_ns);
        drawn.map_or(0, |unknown_ns| unknown_ns - unknown_age_ns)
    }

    /// A remembered unknown part of at least `at_least_ns`. A claim draws the same rank in the same scenario however
    /// often it is asked, so estimates do not jitter from tick to tick.
    fn draw(&self, claim: ClaimId, scenario: u32, at_least_ns: u64) -> Option<u64> {
        let longer = &self.sorted[self.sorted.partition_point(|&sample| sample < at_least_ns)..];
        let random = mix(self.options.seed ^ mix(claim.0 ^ mix(scenario.into())));
        let at = (u128::from(random) * longer.len() as u128) >> 64;
        longer.get(usize::try_from(at).ok()?).copied()
    }
}

impl TimeToUse for SlotProjection {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        if self.running.iter().any(|running| running.work.claim == claim) {
            return Some(0);
        }
        let ahead = self.position(claim)?;
        let scenarios = self.options.scenarios.max(1);
        let mut times: Vec<u64> =
            (0..scenarios).map(|scenario| self.project(ahead, scenario, now_ns)).collect();
        times.sort_unstable();
        let quantile = self.options.quantile_percent.clamp(1, 100) as usize;
        times.get((times.len() * quantile).div_ceil(100) - 1).copied()
    }
}

/// SplitMix64's finaliser.
const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
