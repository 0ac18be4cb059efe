//! The distributions that devices draw from.

use std::f64::consts::TAU;

use fastrand::Rng;

/// A lognormal factor of mean 1; exactly 1 for `sigma` 0.
pub(super) fn lognormal(rng: &mut Rng, sigma: f64) -> f64 {
    if sigma > 0.0 { (sigma * normal(rng) - sigma * sigma / 2.0).exp() } else { 1.0 }
}

/// An exponential time with this mean.
pub(super) fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.f64()).ln()
}

fn normal(rng: &mut Rng) -> f64 {
    (-2.0 * (1.0 - rng.f64()).ln()).sqrt() * (TAU * rng.f64()).cos()
}

/// A generator of its own for each use, so that one more draw here changes nothing there.
pub(super) fn stream(seed: u64, tier: usize, what: Stream) -> Rng {
    let mut root = Rng::with_seed(seed);
    let mut rng = root.fork();
    for _ in 0..2 * tier + what as usize {
        rng = root.fork();
    }
    rng
}

/// What a generator is for.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    /// The device's slow changes of rate, equal for all policies.
    Drift,
    /// Its reads.
    Reads,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_and_times_have_the_mean_that_they_claim() {
        let mut rng = Rng::with_seed(1);
        let n = 200_000;
        let mean =
            |draw: &mut dyn FnMut() -> f64| (0..n).map(|_| draw()).sum::<f64>() / f64::from(n);
        assert!((mean(&mut || lognormal(&mut rng, 0.7)) - 1.0).abs() < 0.01);
        let mut rng = Rng::with_seed(2);
        assert!((mean(&mut || exponential(&mut rng, 3.0)) - 3.0).abs() < 0.05);
    }
}
