//! What is said of a figure that was drawn for several seeds.

use serde::Serialize;

/// Mean, standard error, median and range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean; 0 for a single value.
    pub se: f64,
    /// Median.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// Of at least one value.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let se = if values.len() > 1 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 };
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        let median = (at((values.len() - 1) / 2) + at(values.len() / 2)) / 2.0;
        Self { mean, se, median, min: at(0), max: at(values.len() - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values_give_known_figures() {
        let summary = Summary::of([4.0, 1.0, 3.0, 2.0]);
        let se = (5.0_f64 / 3.0 / 4.0).sqrt();
        assert_eq!(summary, Summary { mean: 2.5, se, median: 2.5, min: 1.0, max: 4.0 });
        let one = Summary::of([7.0]);
        assert_eq!((one.mean, one.se, one.median), (7.0, 0.0, 7.0));
    }
}
