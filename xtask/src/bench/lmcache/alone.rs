//! The yardstick: what the devices, each alone under plain direct reads, would together have moved.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Bytes that one device had delivered at times after the begin. A throttle lets a whole slice pass at once: a device
/// is ahead of its limit at one time and level with it at another.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::bench) struct Alone(Vec<(f64, f64)>);

impl Alone {
    /// From `[[seconds, bytes], ...]`.
    pub(in crate::bench) fn read(value: &Value) -> Result<Self> {
        let pair = |it: &Value| Some((it[0].as_f64()?, it[1].as_f64()?));
        let list = value["arrivals"].as_array().context("no arrivals")?;
        let arrivals: Option<Vec<_>> = list.iter().map(pair).collect();
        let arrivals = arrivals.context("an arrival is no pair of numbers")?;
        ensure!(!arrivals.is_empty(), "nothing arrived");
        Ok(Self(arrivals))
    }

    /// Over the whole run, in bytes/s.
    pub(in crate::bench) fn rate(&self) -> f64 {
        self.0.last().map_or(f64::NAN, |(seconds, bytes)| bytes / seconds)
    }

    fn by(&self, seconds: f64) -> f64 {
        let after = self.0.partition_point(|(at, _)| *at <= seconds);
        let before = after.checked_sub(1).map_or((0.0, 0.0), |it| self.0[it]);
        let rate = match self.0.get(after) {
            Some(next) => (next.1 - before.1) / (next.0 - before.0),
            None => self.rate(),
        };
        before.1 + (seconds - before.0) * rate
    }
}

/// The run that delivered most per second: anything slower was disturbed.
pub(in crate::bench) fn best(runs: &[Alone]) -> Option<&Alone> {
    runs.iter().max_by(|one, other| one.rate().total_cmp(&other.rate()))
}

/// The least time in which these devices together deliver so many bytes.
pub(super) fn bound_s(bytes: f64, devices: &[&Alone]) -> f64 {
    let moved = |seconds: f64| devices.iter().map(|it| it.by(seconds)).sum::<f64>();
    let (mut least, mut most) = (0.0, 3600.0);
    for _ in 0..60 {
        let middle = f64::midpoint(least, most);
        if moved(middle) < bytes { least = middle } else { most = middle }
    }
    most
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn alone(rate: f64) -> Alone {
        Alone((1..=50).map(|at| (f64::from(at) * 0.1, f64::from(at) * 0.1 * rate)).collect())
    }

    #[test]
    fn two_devices_together_take_the_time_of_their_sum() {
        let (fast, slow) = (alone(300.0), alone(100.0));
        assert!((bound_s(1000.0, &[&fast, &slow]) - 2.5).abs() < 1e-6);
        // Behind the end of the runs they go on as before.
        assert!((bound_s(4000.0, &[&fast, &slow]) - 10.0).abs() < 1e-6);
        assert!((bound_s(600.0, &[&fast]) - 2.0).abs() < 1e-6);
    }

    #[test]
    fn a_disturbed_run_is_not_the_yardstick() {
        let runs = [alone(250.0), alone(300.0), alone(290.0)];
        assert_eq!(best(&runs), Some(&runs[1]));
    }

    #[test]
    fn answers_without_numbers_are_refused() {
        assert!(Alone::read(&json!({"arrivals": [[0.1, 5]]})).is_ok());
        for bad in [json!({}), json!({"arrivals": []}), json!({"arrivals": [["x", 5]]})] {
            assert!(Alone::read(&bad).is_err(), "{bad}");
        }
    }
}
