//! One combination of step size, ranks and policy, run for some steps back to back.

use super::{
    machine::Machine,
    policy::{Policy, Sharing},
    profile::Profile,
};

/// Payload of a chunk.
pub const CHUNK_BYTES: u64 = 20 << 20;
/// Separately checksummed blocks of a chunk.
pub const CHUNK_BLOCKS: u32 = 20;

/// How many steps are run and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Steps run first and not counted: the first one finds no losers of another.
    pub warm_up: usize,
    /// Steps counted.
    pub steps: usize,
}

impl Default for Schedule {
    /// 60 steps after 2.
    fn default() -> Self {
        Self { warm_up: 2, steps: 60 }
    }
}

/// The size of a step and how many are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Chunks of a step, over all ranks.
    pub chunks: usize,
    /// Ranks that wait for them; each has as many chunks as another, or one more.
    pub ranks: u16,
    /// How many steps.
    pub schedule: Schedule,
}

/// What one seed gave, summed over its steps.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Outcome {
    /// Seconds from a step's begin until its slowest rank has all its chunks.
    pub seconds: f64,
    /// Seconds that the bound allows.
    pub bound_s: f64,
    /// Seconds at the sum of the nominal rates.
    pub nominal_s: f64,
    /// Payload delivered, each byte once.
    pub bytes: u64,
    /// Payload that duplicates were claimed for.
    pub duplicate_bytes: u64,
    /// Steps.
    pub steps: usize,
}

impl Outcome {
    /// Time over the bound, as a ratio: 0.02 is 2 % longer.
    #[must_use]
    pub fn gap(&self) -> f64 {
        self.seconds / self.bound_s - 1.0
    }

    /// Time over that of the nominal rates, as a ratio.
    #[must_use]
    pub fn over_nominal(&self) -> f64 {
        self.seconds / self.nominal_s - 1.0
    }

    /// Mean seconds of a step.
    #[must_use]
    pub fn step_s(&self) -> f64 {
        self.seconds / self.steps as f64
    }

    /// Duplicates' part of the payload.
    #[must_use]
    pub fn duplicates(&self) -> f64 {
        self.duplicate_bytes as f64 / self.bytes as f64
    }
}

impl Case {
    /// Runs the steps on a fresh machine. `calibrated` is [`Profile::calibrate`]'s.
    #[must_use]
    pub fn run(&self, profile: &Profile, calibrated: &[f64], policy: Policy, seed: u64) -> Outcome {
        let mut machine = Machine::new(profile, seed);
        let mut sharing = Sharing::new(policy, profile, calibrated);
        let mut outcome = Outcome::default();
        let bytes = self.chunks as u64 * CHUNK_BYTES;
        for step in 0..self.schedule.warm_up + self.schedule.steps {
            let from_s = machine.now_s;
            let duplicate_bytes = sharing.step(&mut machine, self);
            if step < self.schedule.warm_up {
                continue;
            }
            outcome.seconds += machine.now_s - from_s;
            outcome.bound_s += machine.bound_s(calibrated, from_s, bytes as f64);
            outcome.nominal_s += bytes as f64 / profile.bytes_per_s();
            outcome.bytes += bytes;
            outcome.duplicate_bytes += duplicate_bytes;
            outcome.steps += 1;
        }
        outcome
    }
}
