//! A device as a queue: bytes served in order at a rate, then a delay that does not occupy the device.

use std::collections::VecDeque;

/// Bytes times nanoseconds per second: in this unit `rate * elapsed_ns` is exact.
const NS_PER_S: u128 = 1_000_000_000;
/// The rate is constant for this part of a drift's period.
const DRIFT_STEPS: u64 = 32;
/// A prediction looks over this many drift steps; a service that takes longer is asked about again.
const STEPS_MAX: u32 = 64;

/// How a tier is paced.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ThrottleConfig {
    /// Bytes (headers included) served in a second, reads and writes together; at least 1.
    pub bytes_per_s: u64,
    /// Bytes that an idle device can serve at once.
    pub burst_bytes: u64,
    /// What each op takes besides its bytes. Ops overlap in it.
    pub latency: Latency,
    /// Ops that take much longer, at random.
    pub stalls: Option<Stalls>,
    /// Slow change of the rate.
    pub drift: Option<Drift>,
    /// Of everything random.
    pub seed: u64,
}

impl ThrottleConfig {
    /// A steady rate without burst, latency, stalls or drift.
    pub const fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s,
            burst_bytes: 0,
            latency: Latency::Fixed { ns: 0 },
            stalls: None,
            drift: None,
            seed: 0,
        }
    }
}

/// Distribution of the time an op takes besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Latency {
    /// Always the same.
    Fixed {
        /// It.
        ns: u64,
    },
    /// Its logarithm is normal.
    Lognormal {
        /// Half of the ops take less.
        median_ns: u64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
}

/// Ops that stop for a while, whatever their size; others go on meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stalls {
    /// Of one op, 0 to 1.
    pub probability: f64,
    /// How long.
    pub stall_ns: u64,
}

/// A sine around the configured rate, whose mean over a period is that rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// Largest deviation as a fraction of the rate, 0 to 1.
    pub fraction: f64,
    /// One swing down and up.
    pub period_ns: u64,
}

impl Drift {
    fn step_ns(self) -> u64 {
        (self.period_ns / DRIFT_STEPS).max(1)
    }

    /// Factor of the rate in the step that contains `now_ns`.
    #[expect(clippy::cast_precision_loss, reason = "a step number of at most 32")]
    fn factor(self, now_ns: u64) -> f64 {
        let step = now_ns / self.step_ns() % DRIFT_STEPS;
        let angle = (step as f64 + 0.5) / DRIFT_STEPS as f64 * std::f64::consts::TAU;
        1.0 + self.fraction.clamp(0.0, 1.0) * angle.sin()
    }
}

/// Draws what one op takes besides its bytes.
#[derive(Debug)]
pub(super) struct Delays {
    latency: Latency,
    stalls: Option<Stalls>,
    random: fastrand::Rng,
}

impl Delays {
    pub(super) fn new(config: &ThrottleConfig) -> Self {
        let random = fastrand::Rng::with_seed(config.seed);
        Self { latency: config.latency, stalls: config.stalls, random }
    }

    pub(super) fn draw_ns(&mut self) -> u64 {
        let latency_ns = match self.latency {
            Latency::Fixed { ns } => ns,
            Latency::Lognormal { median_ns, sigma } => {
                scaled(median_ns, (sigma * self.standard_normal()).exp())
            }
        };
        let stall_ns = match self.stalls {
            Some(stalls) if self.random.f64() < stalls.probability => stalls.stall_ns,
            _ => 0,
        };
        latency_ns.saturating_add(stall_ns)
    }

    /// Box and Muller's transform.
    fn standard_normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.random.f64()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.random.f64()).cos()
    }
}

/// `value * factor`, saturating.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a float cast saturates, and 52 bits of a rate or a latency are enough"
)]
fn scaled(value: u64, factor: f64) -> u64 {
    (value as f64 * factor) as u64
}

/// What is served to a paced device's ops, exactly, whenever it is looked at.
#[derive(Debug)]
pub(super) struct Device<T> {
    bytes_per_s: u64,
    burst: u128,
    drift: Option<Drift>,
    /// Served up to here.
    now_ns: u64,
    /// Unused service, at most `burst`.
    saved: u128,
    jobs: VecDeque<Job<T>>,
    pub(super) hold_writes: bool,
}

#[derive(Debug)]
struct Job<T> {
    left: u128,
    write: bool,
    what: T,
}

impl<T> Device<T> {
    pub(super) fn new(config: &ThrottleConfig) -> Self {
        let burst = u128::from(config.burst_bytes) * NS_PER_S;
        Self {
            bytes_per_s: config.bytes_per_s.max(1),
            burst,
            drift: config.drift,
            now_ns: 0,
            saved: burst,
            jobs: VecDeque::new(),
            hold_writes: false,
        }
    }

    /// From the last [`serve`](Self::serve) on.
    pub(super) fn set_rate(&mut self, bytes_per_s: u64) {
        self.bytes_per_s = bytes_per_s.max(1);
    }

    /// Queues `bytes`. The device must have been served up to now.
    pub(super) fn push(&mut self, bytes: u64, write: bool, what: T) {
        self.jobs.push_back(Job { left: u128::from(bytes) * NS_PER_S, write, what });
    }

    /// Serves until `now_ns`; tells which jobs ended, and when.
    pub(super) fn serve(&mut self, now_ns: u64, mut ended: impl FnMut(u64, T)) {
        loop {
            let Some(first) = self.first() else {
                self.idle(now_ns);
                return;
            };
            let used = self.saved.min(self.jobs[first].left);
            self.saved -= used;
            self.jobs[first].left -= used;
            let left = self.jobs[first].left;
            let until_ns = self.step_end_ns().min(now_ns);
            let rate = self.rate();
            let end_ns = self.now_ns.saturating_add(time_ns(left, rate));
            if left > 0 && end_ns > until_ns {
                let served = rate * u128::from(until_ns.saturating_sub(self.now_ns));
                self.jobs[first].left -= served;
                self.now_ns = self.now_ns.max(until_ns);
                if until_ns >= now_ns {
                    return;
                }
                continue;
            }
            // The last nanosecond served more than was left: the next job, which waits already, gets the rest.
            self.saved += rate * u128::from(end_ns - self.now_ns) - left;
            self.now_ns = end_ns;
            if let Some(job) = self.jobs.remove(first) {
                ended(end_ns, job.what);
            }
            if self.first().is_none() {
                self.saved = self.saved.min(self.burst);
            }
        }
    }

    /// When the job now served will end if nothing changes; for one that takes very long, a time before that.
    pub(super) fn next_end_ns(&self) -> Option<u64> {
        let first = self.first()?;
        let mut left = self.jobs[first].left.saturating_sub(self.saved);
        let mut at_ns = self.now_ns;
        for _ in 0..STEPS_MAX {
            let rate = self.rate_at(at_ns);
            let end_ns = at_ns.saturating_add(time_ns(left, rate));
            let step_end_ns = self.step_end_after(at_ns);
            if end_ns <= step_end_ns {
                return Some(end_ns);
            }
            left -= rate * u128::from(step_end_ns - at_ns);
            at_ns = step_end_ns;
        }
        Some(at_ns)
    }

    /// The job that is served: the first that is not a held write.
    fn first(&self) -> Option<usize> {
        self.jobs.iter().position(|job| !(job.write && self.hold_writes))
    }

    fn idle(&mut self, now_ns: u64) {
        while self.now_ns < now_ns {
            if self.saved >= self.burst {
                self.now_ns = now_ns;
                return;
            }
            let until_ns = self.step_end_ns().min(now_ns);
            let served = self.rate() * u128::from(until_ns - self.now_ns);
            self.saved = (self.saved + served).min(self.burst);
            self.now_ns = until_ns;
        }
    }

    fn rate(&self) -> u128 {
        self.rate_at(self.now_ns)
    }

    fn rate_at(&self, at_ns: u64) -> u128 {
        let factor = self.drift.map_or(1.0, |drift| drift.factor(at_ns));
        scaled(self.bytes_per_s, factor).max(1).into()
    }

    fn step_end_ns(&self) -> u64 {
        self.step_end_after(self.now_ns)
    }

    /// End of the time in which the rate is constant.
    fn step_end_after(&self, at_ns: u64) -> u64 {
        self.drift.map_or(u64::MAX, |drift| {
            let step_ns = drift.step_ns();
            (at_ns / step_ns + 1).saturating_mul(step_ns)
        })
    }
}

fn time_ns(left: u128, rate: u128) -> u64 {
    u64::try_from(left.div_ceil(rate)).unwrap_or(u64::MAX)
}
