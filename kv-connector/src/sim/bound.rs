//! The bound of a step: the time in which its tiers, at their calibrated rates and under the drift
//! that they really had, would together have moved its bytes.

use super::drift::Drift;

/// Seconds from `from_s` on until tiers that move `rates[i]` bytes a second times their drift have
/// moved `bytes`.
pub(super) fn pathwise_s(drifts: &mut [&mut Drift], rates: &[f64], from_s: f64, bytes: f64) -> f64 {
    let mut at: Vec<usize> = drifts.iter_mut().map(|drift| drift.at(from_s)).collect();
    let (mut now_s, mut left) = (from_s, bytes);
    loop {
        let held: Vec<_> = drifts.iter_mut().zip(&at).map(|(drift, &at)| drift.get(at)).collect();
        let rate: f64 = held.iter().zip(rates).map(|(held, rate)| held.factor * rate).sum();
        let end_s = held.iter().map(|held| held.end_s).fold(f64::INFINITY, f64::min);
        if rate * (end_s - now_s) >= left {
            return now_s + left / rate - from_s;
        }
        left -= rate * (end_s - now_s);
        now_s = end_s;
        for (at, held) in at.iter_mut().zip(&held) {
            *at += usize::from(held.end_s <= now_s);
        }
    }
}

/// Seconds in which tiers of these constant rates would together move `bytes`.
#[must_use]
pub fn fluid_s(rates: &[f64], bytes: f64) -> f64 {
    bytes / rates.iter().sum::<f64>()
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    #[test]
    fn without_drift_the_rates_add_up() {
        let mut drifts = [0.0, 0.0].map(|sigma| Drift::new(sigma, 1.0, Rng::with_seed(1)));
        let mut drifts: Vec<&mut Drift> = drifts.iter_mut().collect();
        let bound_s = pathwise_s(&mut drifts, &[3.0, 1.0], 17.0, 8.0);
        assert!((bound_s - 2.0).abs() < 1e-12);
        assert!((fluid_s(&[3.0, 1.0], 8.0) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn the_bound_moves_exactly_the_bytes_along_the_path() {
        let mut drift = Drift::new(0.5, 1.0, Rng::with_seed(3));
        for from_s in [0.0, 2.5, 40.0] {
            let bound_s = pathwise_s(&mut [&mut drift], &[2.0], from_s, 50.0);
            let moved = 2.0 * drift.mean(from_s, from_s + bound_s) * bound_s;
            assert!((moved - 50.0).abs() < 1e-9, "{moved}");
        }
    }
}
