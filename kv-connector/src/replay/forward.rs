//! The forward pass, as a wait: writes drain behind it.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::Engine;

/// How long the model computes in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Forward {
    /// Prompt tokens computed a second; infinite for no wait at all.
    pub tokens_per_s: f64,
    /// Time of every step whatever its tokens.
    pub step: Duration,
    /// How much longer than modelled a pass may take for its writes to drain. With it, every run of a comparison has
    /// the same to read from storage, however slow the disk.
    pub drain: Duration,
}

impl Default for Forward {
    /// 100,000 tokens a second, no further time, no waiting for writes.
    fn default() -> Self {
        Self { tokens_per_s: 100_000.0, step: Duration::ZERO, drain: Duration::ZERO }
    }
}

impl Forward {
    /// Longest pass that is modelled, whatever the trace says.
    const LONGEST: Duration = Duration::from_secs(600);

    /// How long `tokens` take.
    pub fn time(&self, tokens: u64) -> Duration {
        let seconds = tokens as f64 / self.tokens_per_s.max(f64::MIN_POSITIVE);
        let computing = Duration::try_from_secs_f64(seconds).unwrap_or(Self::LONGEST);
        computing.saturating_add(self.step).min(Self::LONGEST)
    }

    /// Computes `tokens`: does `meanwhile` (storing what the pass brings), then waits for the rest of the pass.
    ///
    /// Returns how much longer it took for writes to drain.
    pub(crate) fn pass(&self, engine: &Engine, tokens: u64, meanwhile: impl FnOnce()) -> Duration {
        let end = Instant::now() + self.time(tokens);
        engine.forward_began();
        meanwhile();
        thread::sleep(end.saturating_duration_since(Instant::now()));
        if !self.drain.is_zero() {
            engine.flush(self.drain);
        }
        engine.forward_ended();
        Instant::now().saturating_duration_since(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_follows_tokens_and_is_bounded() {
        let forward =
            Forward { tokens_per_s: 1000.0, step: Duration::from_millis(5), ..Forward::default() };
        assert_eq!(forward.time(2000), Duration::from_millis(2005));
        let none = Forward { tokens_per_s: f64::INFINITY, ..Forward::default() };
        assert_eq!(none.time(u64::MAX), Duration::ZERO);
        let stuck = Forward { tokens_per_s: 0.0, ..Forward::default() };
        assert_eq!(stuck.time(1), Forward::LONGEST);
    }
}
