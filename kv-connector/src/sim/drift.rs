//! How a device's rate changes in the course of time, whatever is read from it.

use fastrand::Rng;

use super::random::{exponential, lognormal};

/// A path of rate factors of mean 1, each held for an exponential time. Grows as it is asked for.
pub(super) struct Drift {
    sigma: f64,
    mean_s: f64,
    rng: Rng,
    held: Vec<Held>,
}

/// One factor and when it ends.
#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) factor: f64,
    pub(super) end_s: f64,
}

impl Drift {
    pub(super) fn new(sigma: f64, mean_s: f64, rng: Rng) -> Self {
        Self { sigma, mean_s, rng, held: Vec::new() }
    }

    /// The `index`-th factor of the path.
    pub(super) fn get(&mut self, index: usize) -> Held {
        while self.held.len() <= index {
            let held = if self.sigma > 0.0 {
                let begin_s = self.held.last().map_or(0.0, |held| held.end_s);
                let factor = lognormal(&mut self.rng, self.sigma);
                Held { factor, end_s: begin_s + exponential(&mut self.rng, self.mean_s) }
            } else {
                Held { factor: 1.0, end_s: f64::INFINITY }
            };
            self.held.push(held);
        }
        self.held[index]
    }

    /// The index of the factor that holds at `time_s`.
    pub(super) fn at(&mut self, time_s: f64) -> usize {
        let mut last = self.held.len();
        while self.get(last).end_s <= time_s {
            last += 1;
        }
        self.held.partition_point(|held| held.end_s <= time_s)
    }

    /// The mean factor between two times.
    pub(super) fn mean(&mut self, from_s: f64, to_s: f64) -> f64 {
        let (mut at, mut now_s, mut sum) = (self.at(from_s), from_s, 0.0);
        while now_s < to_s {
            let held = self.get(at);
            let end_s = held.end_s.min(to_s);
            sum += held.factor * (end_s - now_s);
            (at, now_s) = (at + 1, end_s);
        }
        sum / (to_s - from_s)
    }
}
