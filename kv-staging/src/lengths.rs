//! How long outputs are, by those that have finished.

use std::collections::VecDeque;

/// What is assumed of an output that is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outputs {
    /// Scenarios draw it from the finished ones that were longer than it is now.
    Drawn,
    /// It is as long as the mean; of one beyond the mean, one token is left.
    Mean,
}

/// The latest outputs, in tokens.
#[derive(Clone, Debug)]
pub(crate) struct Lengths {
    max: usize,
    latest: VecDeque<u64>,
    sorted: Vec<u64>,
    sum: u64,
}

impl Lengths {
    pub(crate) fn new(max: usize) -> Self {
        Self { max: max.max(1), latest: VecDeque::new(), sorted: Vec::new(), sum: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.latest.is_empty()
    }

    pub(crate) fn learn(&mut self, tokens: u64) {
        // So bounded, sums do not overflow.
        let tokens = tokens.min(1 << 40);
        self.latest.push_back(tokens);
        self.sorted.insert(self.sorted.partition_point(|&length| length < tokens), tokens);
        self.sum += tokens;
        if self.latest.len() > self.max {
            let oldest = self.latest.pop_front().expect("it is not empty");
            self.sorted.remove(self.sorted.partition_point(|&length| length < oldest));
            self.sum -= oldest;
        }
    }

    /// What the mean leaves after `written`; 0 while nothing is known, so that the estimate is early.
    pub(crate) fn mean_left(&self, written: u64) -> u64 {
        let mean = self.sum.checked_div(self.latest.len() as u64);
        mean.map_or(0, |mean| mean.saturating_sub(written).max(1))
    }

    /// What is left after `written` of the output with rank `rank` of `ranks` among those that were longer; of one that
    /// is longer than any, next to nothing.
    pub(crate) fn draw_left(&self, rank: u32, ranks: u32, written: u64) -> u64 {
        let longer = &self.sorted[self.sorted.partition_point(|&length| length <= written)..];
        let position = (2 * u64::from(rank) + 1) * longer.len() as u64 / (2 * u64::from(ranks));
        let drawn = usize::try_from(position).ok().and_then(|at| longer.get(at));
        drawn.map_or(0, |length| length - written)
    }
}
