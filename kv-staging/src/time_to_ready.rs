//! How long would staging take, begun now?

use crate::Object;

const NS_PER_S: u64 = 1_000_000_000;

/// What a claim still lacks.
#[derive(Clone, Copy, Debug)]
pub struct StagingNeed<'a> {
    /// Objects that no claim has staged or begun to stage. Parts of them may be resident all the same: whoever knows
    /// the device subtracts that.
    pub cold: &'a [Object],
    /// Bytes of its other objects that are coming in for an earlier claim.
    pub in_flight_bytes: u64,
}

/// Estimates the time from commitment until a claim's data are in fast memory and protected.
///
/// # Contract
/// * It is for a claim committed at `now_ns`, behind all staging that is queued or in progress.
/// * Missing bytes are those neither resident nor already coming in; the rate is the device's **aggregate** effective
///   rate, not one stream's.
/// * A claim that lacks nothing takes 0.
/// * An unknown residency counts as absent: the estimate is then late, and the claim early.
/// * Asking changes nothing, and asking twice at one `now_ns` gives the same answer.
pub trait TimeToReady {
    /// Nanoseconds from `now_ns`.
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, now_ns: u64) -> u64;
}

/// Options of [`RateModel`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RateOptions {
    /// Rate assumed until one is measured, bytes per second; at least 1 is assumed.
    pub initial_bytes_per_s: u64,
    /// Cost of any staging, however small.
    pub fixed_ns: u64,
    /// Busy time over which one rate sample is taken; at least 1 is assumed.
    pub window_ns: u64,
    /// Weight of a new sample, 1 to 100.
    pub weight_percent: u32,
}

impl RateOptions {
    /// Defaults: no fixed cost, samples of 50 ms that count for 25 %.
    pub const fn new(initial_bytes_per_s: u64) -> Self {
        Self { initial_bytes_per_s, fixed_ns: 0, window_ns: 50_000_000, weight_percent: 25 }
    }
}

/// Queue over measured rate: (bytes in flight + missing bytes) / aggregate rate + a fixed cost. It knows nothing of
/// residency, so every cold byte counts as missing.
#[derive(Clone, Debug)]
pub struct RateModel {
    options: RateOptions,
    bytes_per_s: u64,
    in_flight_bytes: u64,
    /// Since when the current sample runs; only time with something in flight counts.
    since_ns: u64,
    busy_ns: u64,
    moved_bytes: u64,
}

impl RateModel {
    /// An idle device.
    pub fn new(options: RateOptions) -> Self {
        let bytes_per_s = options.initial_bytes_per_s.max(1);
        Self { options, bytes_per_s, in_flight_bytes: 0, since_ns: 0, busy_ns: 0, moved_bytes: 0 }
    }

    /// `bytes` of staging were handed to the device.
    pub fn submitted(&mut self, bytes: u64, now_ns: u64) {
        self.advance(now_ns);
        self.in_flight_bytes = self.in_flight_bytes.saturating_add(bytes);
    }

    /// `bytes` of it arrived.
    pub fn completed(&mut self, bytes: u64, now_ns: u64) {
        self.advance(now_ns);
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
        self.moved_bytes = self.moved_bytes.saturating_add(bytes);
        if self.busy_ns >= self.options.window_ns.max(1) {
            self.sample();
        }
    }

    /// `bytes` of it will not arrive; nothing is learnt from them.
    pub fn abandoned(&mut self, bytes: u64, now_ns: u64) {
        self.advance(now_ns);
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
    }

    /// The rate believed now.
    pub const fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }

    fn advance(&mut self, now_ns: u64) {
        if self.in_flight_bytes > 0 {
            self.busy_ns += now_ns.saturating_sub(self.since_ns);
        }
        self.since_ns = self.since_ns.max(now_ns);
    }

    fn sample(&mut self) {
        let sample = u128::from(self.moved_bytes) * u128::from(NS_PER_S) / u128::from(self.busy_ns);
        let weight = u128::from(self.options.weight_percent.clamp(1, 100));
        let mean = (sample * weight + u128::from(self.bytes_per_s) * (100 - weight)) / 100;
        self.bytes_per_s = u64::try_from(mean).unwrap_or(u64::MAX).max(1);
        (self.busy_ns, self.moved_bytes) = (0, 0);
    }
}

impl TimeToReady for RateModel {
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, _now_ns: u64) -> u64 {
        let missing: u128 = need.cold.iter().map(|object| u128::from(object.bytes)).sum();
        if missing == 0 && need.in_flight_bytes == 0 {
            return 0;
        }
        // What comes in for earlier claims is part of what is in flight.
        let bytes = missing + u128::from(self.in_flight_bytes.max(need.in_flight_bytes));
        let moving_ns = bytes * u128::from(NS_PER_S) / u128::from(self.bytes_per_s);
        u64::try_from(moving_ns).unwrap_or(u64::MAX).saturating_add(self.options.fixed_ns)
    }
}
