//! A first look at a tier that nobody uses: windows of 1, 2, 4 and so on, until twice as many reads do not bring nearly
//! twice as much.

use super::{
    TOLERANCE,
    meter::{Meter, Quota},
};

/// Short: a factor of two is easily seen.
const RUNG: Quota = Quota { cycles: 1, reads: 8, ns: 1 };
/// A rung that gains less over the one before it, and less over the one before that, is the last one: the knee is below it.
/// Twice, because few reads were seen.
const GAINS_MIN: [f64; 2] = [1.55, 2.7];
/// Windows up to 2^31.
const RUNGS_MAX: usize = 32;

/// Finds about where a tier's knee is, in a few reads. What it says is a place to start a [`Knee`](crate::Knee) at.
///
/// Fed like a [`Knee`](crate::Knee), with reads that nobody waits for. It ends by itself; the caller bounds time and
/// bytes and may ask for the result at any time.
#[derive(Clone, Debug)]
pub struct KneeProbe {
    max: u32,
    limit: u32,
    rungs: usize,
    /// The rate with a window of 2^i, the last one with a window of `max`.
    rates: [f64; RUNGS_MAX],
    finished: bool,
    meter: Meter,
}

impl KneeProbe {
    /// A probe of windows up to `max`.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self {
            max: max.max(1),
            limit: 1,
            rungs: 0,
            rates: [0.0; RUNGS_MAX],
            finished: false,
            meter: Meter::default(),
        }
    }

    /// The window now: so many reads should be in flight.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Whether no further reads are needed.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// A read ended and brought `bytes`. Ask for the [`limit`](Self::limit) afterwards.
    pub fn completed(&mut self, bytes: u64, now_ns: u64) {
        self.meter.completed(self.limit, bytes, now_ns);
        let Some(rate) = self.meter.take(&RUNG) else { return };
        if self.finished || self.rungs == RUNGS_MAX {
            return;
        }
        let below = self.rates[..self.rungs].iter().rev();
        let flat = below.zip(GAINS_MIN).filter(|(below, gain)| rate < gain * **below).count();
        self.rates[self.rungs] = rate;
        self.rungs += 1;
        if flat < GAINS_MIN.len() && self.limit < self.max {
            self.limit = self.limit.saturating_mul(2).min(self.max);
            self.meter.restart();
        } else {
            self.finished = true;
        }
    }

    /// The window was filled as far as there was work.
    pub fn refilled(&mut self, in_flight: u32) {
        self.meter.refilled(self.limit, in_flight == self.limit);
    }

    /// The window to start with, at or above the knee as far as it was seen; `None` if hardly anything was. If the probe
    /// was stopped before the rate ceased to grow, the knee may lie above.
    #[must_use]
    pub fn window(&self) -> Option<u32> {
        let rates = &self.rates[..self.rungs];
        if rates.len() < 2 {
            return None;
        }
        let best = rates.iter().copied().fold(0.0, f64::max);
        let enough = rates.iter().position(|&rate| rate >= (1.0 - TOLERANCE) * best)?;
        let Some(below) = enough.checked_sub(1) else { return Some(1) };
        // Up to the knee the rate grows with the window. A quarter more, since few reads were seen.
        let knee = self.window_of(below) as f64 * best / rates[below];
        Some(round_up(1.25 * knee).min(self.window_of(enough)))
    }

    fn window_of(&self, rung: usize) -> u32 {
        u32::try_from(rung)
            .ok()
            .and_then(|rung| 1_u32.checked_shl(rung))
            .map_or(self.max, |window| window.min(self.max))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float cast saturates; windows are small"
)]
fn round_up(window: f64) -> u32 {
    window.ceil() as u32
}
