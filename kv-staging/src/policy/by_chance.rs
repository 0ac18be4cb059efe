//! Tempo-Q for an engine: priced by its usual claims, and by a time alone where nobody knows a chance.

use super::{Outlook, Policy, Tempo, TempoQ};

/// [`TempoQ`] where the estimator knows how likely use is, else [`Tempo`]; the price of lateness is in proportion to a
/// usual claim.
///
/// Whoever does not know beforehand how large its claims are names that price in percent: a claim of usual size is then
/// judged the same whatever the model. Usual is a moving average over the claims recorded lately.
#[derive(Clone, Copy, Debug)]
pub struct ByChance {
    /// Judges a claim of which a chance is known ([`Outlook::use_chance_permille`]); its
    /// [`late_price_bytes`](TempoQ::late_price_bytes) does not count.
    pub by_chance: TempoQ,
    /// Judges a claim of which only a time is known: give it a margin if that time is a mean.
    pub by_quantile: Tempo,
    /// The price of lateness, in percent of a usual claim's bytes.
    pub late_price_percent: u32,
    usual_bytes: u64,
}

impl ByChance {
    /// So many claims make the average.
    const CLAIMS: u64 = 8;

    /// Without claims yet.
    pub const fn new(by_chance: TempoQ, by_quantile: Tempo, late_price_percent: u32) -> Self {
        Self { by_chance, by_quantile, late_price_percent, usual_bytes: 0 }
    }
}

impl Policy for ByChance {
    fn name(&self) -> &'static str {
        "by_chance"
    }

    /// A claim of nothing says nothing of the others.
    fn recorded(&mut self, bytes: u64) {
        let old = self.usual_bytes;
        self.usual_bytes = match (old, bytes) {
            (_, 0) => old,
            (0, _) => bytes,
            _ => old - old / Self::CLAIMS + bytes / Self::CLAIMS,
        };
    }

    fn is_eligible(&self, outlook: &Outlook) -> bool {
        if outlook.use_chance_permille.is_none() {
            return self.by_quantile.is_eligible(outlook);
        }
        let price = u128::from(self.usual_bytes) * u128::from(self.late_price_percent) / 100;
        let late_price_bytes = u64::try_from(price).unwrap_or(u64::MAX);
        TempoQ { late_price_bytes, ..self.by_chance }.is_eligible(outlook)
    }

    fn lead_ns(&self, time_to_ready_ns: u64, restage_ns: &dyn Fn() -> Option<u64>) -> Option<u64> {
        self.by_chance.lead_ns(time_to_ready_ns, restage_ns)
    }

    /// What is there already is only kept there: that is never too late to begin.
    fn soon_ns(&self, time_to_ready_ns: u64) -> Option<u64> {
        (time_to_ready_ns > 0).then(|| self.by_chance.soon_ns(time_to_ready_ns)).flatten()
    }

    fn takes_turns(&self) -> bool {
        self.by_chance.takes_turns()
    }

    fn commits_ahead(&self) -> bool {
        self.by_chance.commits_ahead()
    }
}
