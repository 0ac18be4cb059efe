//! The policies that are compared. All of them run in the engine: what differs is which tiers a chunk may be read from,
//! and what happens at the end of a step.

use kv_connector::{TailPolicy, TierId, TierMask};

/// Weight of the latest step in the moving average.
const EWMA_WEIGHT: f64 = 0.3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// Requests one after another, each from the fastest device alone.
    Serial,
    /// The whole step from the fastest device alone.
    FastOnly,
    /// Chunks dealt out beforehand in fixed shares: the best of a grid.
    StaticBest,
    /// The same, in shares that follow each device's rate in the steps before.
    Ewma,
    /// One claim for each completion: whole chunks, no duplicates.
    Window,
    /// The engine as it is.
    Kvbraid,
}

impl Policy {
    pub(super) const ALL: [Self; 6] =
        [Self::Serial, Self::FastOnly, Self::StaticBest, Self::Ewma, Self::Window, Self::Kvbraid];

    /// Its name in every table and file.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Serial => "serial",
            Self::FastOnly => "fast_only",
            Self::StaticBest => "static_best",
            Self::Ewma => "ewma",
            Self::Window => "window",
            Self::Kvbraid => "kvbraid",
        }
    }

    /// What idle devices do at the end of a step.
    pub(super) fn tail(self) -> TailPolicy {
        match self {
            Self::Kvbraid => TailPolicy::default(),
            _ => TailPolicy::Whole,
        }
    }
}

/// Gives each chunk to the device that is furthest behind its share, so that every stretch is split alike.
pub(super) fn deal(chunks: usize, shares: &[f64]) -> Vec<TierMask> {
    let mut owed = vec![0.0; shares.len()];
    let next = |_| {
        owed.iter_mut().zip(shares).for_each(|(owed, share)| *owed += share);
        let most = (0..owed.len()).max_by(|a, b| owed[*a].total_cmp(&owed[*b])).unwrap_or(0);
        owed[most] -= 1.0;
        only(most)
    };
    (0..chunks).map(next).collect()
}

/// One device.
pub(super) fn only(tier: usize) -> TierMask {
    TierMask::only(TierId(u8::try_from(tier).unwrap_or(u8::MAX)))
}

/// The grid of fixed splits: the fastest device's share moved by these steps from what the rates suggest.
pub(super) fn grid(rates: &[f64]) -> Vec<Vec<f64>> {
    let suggested = shares(rates)[0];
    (-3..=2)
        .map(|step| suggested + 0.05 * f64::from(step))
        .filter(|share| *share <= 1.0)
        .map(|share| vec![share, 1.0 - share])
        .collect()
}

/// Shares by rate.
pub(super) fn shares(rates: &[f64]) -> Vec<f64> {
    let sum: f64 = rates.iter().sum();
    rates.iter().map(|rate| rate / sum).collect()
}

/// The rate of each device, averaged over the steps before.
#[derive(Clone, Debug)]
pub(super) struct Average(Vec<f64>);

impl Average {
    pub(super) fn new(rates: Vec<f64>) -> Self {
        Self(rates)
    }

    pub(super) fn shares(&self) -> Vec<f64> {
        shares(&self.0)
    }

    /// Takes the rates of one more step; a device that had nothing to do says nothing.
    pub(super) fn add(&mut self, bytes: &[u64], busy_s: &[f64]) {
        for ((average, bytes), busy_s) in self.0.iter_mut().zip(bytes).zip(busy_s) {
            if *busy_s > 0.0 {
                *average += EWMA_WEIGHT * (*bytes as f64 / busy_s - *average);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_dealt_out_in_shares_all_along() {
        let masks = deal(200, &[0.75, 0.25]);
        for stretch in masks.chunks(20) {
            assert_eq!(stretch.iter().filter(|mask| **mask == only(0)).count(), 15);
        }
    }

    #[test]
    fn the_grid_is_of_shares_around_the_suggested_one() {
        let grid = grid(&[300.0, 100.0]);
        assert_eq!(grid.len(), 6);
        assert!(grid.iter().all(|shares| (shares.iter().sum::<f64>() - 1.0).abs() < 1e-12));
        assert!((grid[3][0] - 0.75).abs() < 1e-12 && (grid[0][0] - 0.6).abs() < 1e-12);
        assert_eq!(super::grid(&[99.0, 1.0]).len(), 4, "no device reads more than everything");
    }

    #[test]
    fn averages_follow_the_rates_of_devices_that_worked() {
        let mut average = Average::new(vec![300.0, 100.0]);
        average.add(&[1000, 0], &[10.0, 0.0]);
        let shares = average.shares();
        assert!((shares[0] - 240.0 / 340.0).abs() < 1e-12, "{shares:?}");
    }
}
