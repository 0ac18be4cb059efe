//! How many reads a tier needs in flight: the least that reach its full rate, learned while it works.

mod ladder;
mod meter;
mod trial;

pub use self::ladder::KneeProbe;
use self::{
    meter::{Meter, Quota},
    trial::{Trial, Verdict},
};

/// What two rates may differ by and still be equal: the knee is where 98 % of the rate is reached.
const TOLERANCE: f64 = 0.02;

/// An interval is two cycles of the window, so many reads, and longer than a thread is ever late.
const INTERVAL: Quota = Quota { cycles: 2, reads: 24, ns: 5_000_000 };

/// Intervals without a trial after nothing better was found, at first and at most: it doubles.
const REST_MIN: u32 = 8;
const REST_MAX: u32 = 192;

/// Spells of a full window without a whole cycle after which a trial ends: the steps are too short for it.
const VAIN_SPELLS_MAX: u32 = 8;

/// Between which numbers a window is sought, and where the search begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KneeConfig {
    /// The smallest window; at least 1.
    pub min: u32,
    /// The largest window; at least `min`.
    pub max: u32,
    /// The first window.
    pub start: u32,
}

/// Learns one tier's window from its completions. Single owner: the tier's thread.
///
/// It compares the window in use with a larger or smaller one, in neighbouring intervals in which the window stayed
/// full, and moves when the smaller keeps 98 % of the rate or the larger gains over 2 %. Only intervals of the same
/// trial are ever compared, so that a device that drifts is judged like one that does not. Trials start wide and become
/// narrow; when nothing better is left they become rare, and never cease: a device may change.
///
/// It errs upwards: a window too large costs a little at the end of each step, one too small costs rate all the time.
/// No allocation, a fixed amount of memory, no clock.
///
/// ```
/// use kv_router::{Knee, KneeConfig, Window};
///
/// let mut knee = Knee::new(KneeConfig { min: 1, max: 32, start: 8 });
/// let mut window = Window::new(knee.limit());
/// while window.start() {} // a read each
/// knee.refilled(window.in_flight(), true);
///
/// // For each read that ended, and then once after the window was filled again:
/// window.end();
/// knee.completed(4 << 20, 1_000_000);
/// window.set_limit(knee.limit());
/// while window.start() {}
/// knee.refilled(window.in_flight(), true);
/// ```
#[derive(Clone, Debug)]
pub struct Knee {
    config: KneeConfig,
    /// The window outside trials.
    base: u32,
    /// How far the next trial goes.
    step: u32,
    /// Whether it goes up.
    upward: bool,
    /// Trials of the smallest step in a row that found nothing better.
    stays: u32,
    rest: u32,
    /// Intervals until the next trial; counted outside trials.
    rest_left: u32,
    trial: Option<Trial>,
    meter: Meter,
}

impl Knee {
    /// Begins at `config.start`; numbers out of order are put in order.
    #[must_use]
    pub fn new(config: KneeConfig) -> Self {
        let min = config.min.max(1);
        let max = config.max.max(min);
        let start = config.start.clamp(min, max);
        let mut knee = Self {
            config: KneeConfig { min, max, start },
            base: start,
            step: start,
            upward: true,
            stays: 0,
            rest: REST_MIN,
            rest_left: 0,
            trial: None,
            meter: Meter::default(),
        };
        knee.begin_trial();
        knee
    }

    /// Begins again at a window that was measured otherwise, with a narrower search.
    pub fn start_at(&mut self, window: u32) {
        *self = Self::new(KneeConfig { start: window, ..self.config });
        self.step = (self.base / 4).max(self.step_min());
        self.begin_trial();
    }

    /// The window now: at most so many reads may be in flight.
    #[must_use]
    pub fn limit(&self) -> u32 {
        match &self.trial {
            Some(trial) if trial.is_candidates_turn() => trial.candidate,
            _ => self.base,
        }
    }

    /// The best window known: what [`limit`](Self::limit) is outside trials.
    #[must_use]
    pub fn base(&self) -> u32 {
        self.base
    }

    /// Whether neither a slightly larger nor a slightly smaller window was better when last tried.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.stays >= 2
    }

    /// A read ended and brought `bytes`. Ask for the [`limit`](Self::limit) afterwards.
    pub fn completed(&mut self, bytes: u64, now_ns: u64) {
        let limit = self.limit();
        self.meter.completed(limit, bytes, now_ns);
        let Some(rate) = self.meter.take(&INTERVAL) else { return };
        self.interval_ended(rate, now_ns);
        if self.limit() != limit {
            self.meter.restart();
        }
    }

    /// The window was filled as far as there was work: call it after completions, and whenever a read was started.
    /// `comparable` is false while something else loads the tier that it does not always do: smaller reads than usual,
    /// a write, a read that failed.
    pub fn refilled(&mut self, in_flight: u32, comparable: bool) {
        let limit = self.limit();
        self.meter.refilled(limit, comparable && in_flight == limit);
        if self.trial.is_some() && self.meter.vain_spells >= VAIN_SPELLS_MAX {
            self.stay();
            self.end_trial();
            self.meter.restart();
        }
    }

    fn interval_ended(&mut self, rate: f64, now_ns: u64) {
        let Some(trial) = &mut self.trial else {
            self.rest_left = self.rest_left.saturating_sub(1);
            if self.rest_left == 0 {
                self.begin_trial();
            }
            return;
        };
        let candidate = trial.candidate;
        match trial.push(rate, now_ns) {
            None => return,
            Some(Verdict::Move) => self.move_to(candidate),
            Some(Verdict::Stay) => self.stay(),
        }
        self.end_trial();
    }

    fn end_trial(&mut self) {
        self.trial = None;
        if self.rest_left == 0 {
            self.begin_trial();
        }
    }

    fn move_to(&mut self, window: u32) {
        self.base = window;
        self.stays = 0;
        self.rest = (self.rest / 2).max(REST_MIN);
        // The same way again, and further.
        self.step = self.step.saturating_mul(2).min(self.config.max).max(self.step_min());
    }

    fn stay(&mut self) {
        self.stays = if self.step <= self.step_min() { self.stays + 1 } else { 0 };
        self.step = (self.step / 2).max(self.step_min());
        self.upward = !self.upward;
        if self.stays >= 2 && self.stays.is_multiple_of(2) {
            self.rest_left = self.rest;
            self.rest = (2 * self.rest).min(REST_MAX);
        }
    }

    /// An eighth: less would take long to tell.
    fn step_min(&self) -> u32 {
        (self.base / 8).max(1)
    }

    fn begin_trial(&mut self) {
        let KneeConfig { min, max, .. } = self.config;
        if min == max {
            self.trial = None;
            return;
        }
        let blocked = if self.upward { self.base == max } else { self.base == min };
        self.upward ^= blocked;
        let candidate = if self.upward {
            self.base.saturating_add(self.step.min(self.base)).min(max)
        } else {
            // Never below half: half costs as much rate as is worth knowing.
            self.base.saturating_sub(self.step.min(self.base / 2)).max(min)
        };
        self.trial = (candidate != self.base).then(|| Trial::new(self.base, candidate));
    }
}
