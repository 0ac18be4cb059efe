//! Two windows compared in neighbouring intervals.

use super::TOLERANCE;

/// Pairs of intervals after which a trial ends in any case.
const ROUNDS_MAX: usize = 20;
/// Pairs of intervals before which only what is obvious decides.
const ROUNDS_MIN: usize = 3;
/// A ratio beyond this, two times in a row, is obvious.
const OBVIOUS: f64 = 0.2;
/// Spread of the ratios, as a logarithm, that is assumed before any is seen, with the weight of so many of them.
const SPREAD_BEFORE: f64 = 0.1;
const WEIGHT_BEFORE: f64 = 2.0;
/// Median deviations from the median beyond which a ratio counts as no farther.
const OUTLIER: f64 = 5.0;
/// A pair of intervals is neighbouring if the second ends so soon after the first.
const APART_MAX_NS: u64 = 30_000_000_000;

/// A comparison of the window in use with another one. Intervals come in the order A B, B A, A B, so that a steady
/// change of the device cancels out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    pub(crate) candidate: u32,
    deeper: bool,
    rounds: usize,
    /// Logarithms of the candidate's rate over the base's.
    ratios: [f64; ROUNDS_MAX],
    /// The round's first interval: its rate, and when it ended.
    first: Option<(f64, u64)>,
}

/// What a trial says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The candidate is the better window.
    Move,
    /// The base is.
    Stay,
}

impl Trial {
    pub(crate) fn new(base: u32, candidate: u32) -> Self {
        let ratios = [0.0; ROUNDS_MAX];
        Self { candidate, deeper: candidate > base, rounds: 0, ratios, first: None }
    }

    /// Whether the interval that runs now is the candidate's.
    pub(crate) fn is_candidates_turn(&self) -> bool {
        (self.rounds % 2 == 1) != self.first.is_some()
    }

    /// An interval ended.
    pub(crate) fn push(&mut self, rate: f64, now_ns: u64) -> Option<Verdict> {
        let Some((first, at_ns)) = self.first.take() else {
            self.first = Some((rate, now_ns));
            return None;
        };
        if now_ns.saturating_sub(at_ns) > APART_MAX_NS {
            return None;
        }
        // Before `first` was taken it was the other's turn.
        let candidate_was_first = self.rounds % 2 == 1;
        let (base, candidate) = if candidate_was_first { (rate, first) } else { (first, rate) };
        self.ratios[self.rounds] = (candidate / base).ln();
        self.rounds += 1;
        self.verdict()
    }

    /// Errs towards the deeper window: one too deep costs a little at the end of each step, one too shallow costs rate
    /// all the time.
    fn verdict(&self) -> Option<Verdict> {
        let seen = &self.ratios[..self.rounds];
        let decide = |moves: bool| Some(if moves { Verdict::Move } else { Verdict::Stay });
        if let [.., one, other] = seen
            && (one.min(*other) > OBVIOUS || one.max(*other) < -OBVIOUS)
        {
            return decide(*one > 0.0);
        }
        if seen.len() < ROUNDS_MIN {
            return None;
        }
        let (mean, error) = mean_and_error(seen);
        let last = seen.len() == ROUNDS_MAX;
        if self.deeper {
            let sure = if last { 1.0 } else { 2.0 };
            if mean - sure * error > TOLERANCE {
                return decide(true);
            }
            (last || mean + error < 2.0 * TOLERANCE).then_some(Verdict::Stay)
        } else {
            if mean - 2.0 * error > -1.5 * TOLERANCE || (last && mean - error > -TOLERANCE) {
                return decide(true);
            }
            (last || mean + error < -TOLERANCE).then_some(Verdict::Stay)
        }
    }
}

/// The mean and its standard error; what is far from the median counts as less far. The median itself would not do: a
/// window that is too small for reads that stall is slow in some intervals only.
fn mean_and_error(seen: &[f64]) -> (f64, f64) {
    let mut sorted = [0.0; ROUNDS_MAX];
    let sorted = &mut sorted[..seen.len()];
    sorted.copy_from_slice(seen);
    let median = median_of(sorted);
    sorted.iter_mut().for_each(|ratio| *ratio = (*ratio - median).abs());
    let reach = (OUTLIER * median_of(sorted)).max(OBVIOUS);
    let count = seen.len() as f64;
    let near = || seen.iter().map(|ratio| ratio.clamp(median - reach, median + reach));
    let mean = near().sum::<f64>() / count;
    let squares: f64 = near().map(|ratio| (ratio - mean).powi(2)).sum();
    let before = WEIGHT_BEFORE * SPREAD_BEFORE * SPREAD_BEFORE;
    let variance = (squares + before) / (count - 1.0 + WEIGHT_BEFORE);
    (mean, (variance / count).sqrt())
}

fn median_of(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len() % 2 == 1 { values[half] } else { (values[half - 1] + values[half]) / 2.0 }
}
