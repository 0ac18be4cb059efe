//! One tier's device in virtual time.

use std::{cmp::Ordering, collections::BinaryHeap};

use fastrand::Rng;

use super::{
    drift::Drift,
    profile::TierProfile,
    random::{Stream, lognormal, stream},
};

/// Shares its rate among the reads in flight; `T` is what the caller knows a read by.
pub(super) struct Device<T> {
    profile: TierProfile,
    pub(super) drift: Drift,
    /// Index of the drift's factor that holds now.
    held: usize,
    rng: Rng,
    now_s: f64,
    /// Bytes that a read would have had if it had been there from the beginning.
    served: f64,
    /// Reads that transfer, by the value of `served` at which they end.
    running: BinaryHeap<Due<T>>,
    /// Reads that stall, by the time at which they begin to transfer.
    stalled: BinaryHeap<Due<(T, f64)>>,
}

impl<T> Device<T> {
    pub(super) fn new(profile: TierProfile, seed: u64, tier: usize) -> Self {
        let drift = Drift::new(profile.drift, profile.drift_s, stream(seed, tier, Stream::Drift));
        Self {
            profile,
            drift,
            held: 0,
            rng: stream(seed, tier, Stream::Reads),
            now_s: 0.0,
            served: 0.0,
            running: BinaryHeap::new(),
            stalled: BinaryHeap::new(),
        }
    }

    /// Begins a read at `now_s`, which is not before any event so far.
    pub(super) fn start(&mut self, now_s: f64, bytes: f64, read: T) {
        self.serve_until(now_s);
        let stall = self.profile.stall;
        if stall.probability > 0.0 && self.rng.f64() < stall.probability {
            let at = now_s + stall.mean_s * lognormal(&mut self.rng, stall.sigma);
            self.stalled.push(Due { at, what: (read, bytes) });
        } else {
            self.transfer(bytes, read);
        }
    }

    /// When the device next changes by itself; infinite if never.
    pub(super) fn next_s(&mut self) -> f64 {
        self.next().0
    }

    /// Passes its next event, and gives the read that ended by it.
    pub(super) fn advance(&mut self) -> Option<T> {
        let (time_s, event) = self.next();
        self.serve_until(time_s);
        match event {
            Event::Ended => {
                let ended = self.running.pop()?;
                // Against the rounding of many small sums.
                self.served = if self.running.is_empty() { 0.0 } else { ended.at };
                return Some(ended.what);
            }
            Event::Woke => {
                let (read, bytes) = self.stalled.pop()?.what;
                self.transfer(bytes, read);
            }
            Event::Drifted => self.held += 1,
        }
        None
    }

    fn next(&mut self) -> (f64, Event) {
        let mut next = (self.drift.get(self.held).end_s, Event::Drifted);
        if let Some(due) = self.stalled.peek()
            && due.at < next.0
        {
            next = (due.at, Event::Woke);
        }
        if let Some(at) = self.running.peek().map(|due| due.at) {
            let ends_s = self.now_s + ((at - self.served) / self.rate()).max(0.0);
            if ends_s <= next.0 {
                next = (ends_s, Event::Ended);
            }
        }
        next
    }

    fn transfer(&mut self, bytes: f64, read: T) {
        let profile = &self.profile;
        let fixed = profile.latency_s * profile.bytes_per_s * profile.share_max;
        let work = bytes * lognormal(&mut self.rng, profile.jitter) + fixed;
        self.running.push(Due { at: self.served + work, what: read });
    }

    /// What each transferring read gets now, in bytes a second.
    fn rate(&mut self) -> f64 {
        let share = (1.0 / self.running.len() as f64).min(self.profile.share_max);
        self.profile.bytes_per_s * self.drift.get(self.held).factor * share
    }

    fn serve_until(&mut self, time_s: f64) {
        if !self.running.is_empty() {
            self.served += self.rate() * (time_s - self.now_s);
        }
        self.now_s = time_s;
    }
}

enum Event {
    Ended,
    Woke,
    Drifted,
}

/// Something due at a point; the earliest is the greatest, as a heap wants it.
struct Due<T> {
    at: f64,
    what: T,
}

impl<T> Ord for Due<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at)
    }
}

impl<T> PartialOrd for Due<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Due<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Due<T> {}
