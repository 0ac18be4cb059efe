//! The ways to serve one step that are compared.

use std::str::FromStr;

use crate::{TierId, TierMask};

/// How the chunks of a step are read.
#[derive(Clone, Debug, PartialEq)]
pub enum Policy {
    /// The requests of a step one after another, each from the fastest tier alone.
    Serial,
    /// The whole step as one pool, from the fastest tier alone.
    FastOnly,
    /// The whole step at once, its chunks dealt out to the tiers beforehand in these fixed shares, one per tier.
    Static(Vec<f64>),
    /// The whole step as one pool that every tier takes from: KVBraid.
    Kvbraid,
}

impl Policy {
    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Serial => "serial",
            Self::FastOnly => "fast_only",
            Self::Static(_) => "static_best",
            Self::Kvbraid => "kvbraid",
        }
    }

    /// The tiers that each of `chunks` chunks, in order, may be read from.
    pub(crate) fn masks(&self, chunks: usize, fastest: TierId) -> Vec<TierMask> {
        match self {
            Self::Serial | Self::FastOnly => vec![TierMask::only(fastest); chunks],
            Self::Static(shares) => deal(chunks, shares),
            Self::Kvbraid => vec![TierMask::all(u8::MAX); chunks],
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    /// `serial`, `fast_only`, `kvbraid`, or `static:` and a share for each tier, such as `static:0.75,0.25`.
    fn from_str(text: &str) -> Result<Self, String> {
        let hint = || {
            format!("`{text}` is no policy: give serial, fast_only, kvbraid or static:0.75,0.25")
        };
        match text {
            "serial" => Ok(Self::Serial),
            "fast_only" => Ok(Self::FastOnly),
            "kvbraid" => Ok(Self::Kvbraid),
            _ => {
                let shares = text.strip_prefix("static:").ok_or_else(hint)?;
                let share = |share: &str| share.trim().parse::<f64>().map_err(|_| hint());
                let shares = shares.split(',').map(share).collect::<Result<Vec<_>, _>>()?;
                let total: f64 = shares.iter().sum();
                let whole = (total - 1.0).abs() < 1e-6;
                if !whole || shares.iter().any(|share| *share < 0.0) {
                    return Err(format!("the shares of `{text}` add up to {total}, not to 1"));
                }
                Ok(Self::Static(shares))
            }
        }
    }
}

/// Gives each chunk to the tier that is furthest behind its share, so that every stretch is split alike.
fn deal(chunks: usize, shares: &[f64]) -> Vec<TierMask> {
    let mut owed = vec![0.0; shares.len()];
    let mut next = || {
        for (owed, share) in owed.iter_mut().zip(shares) {
            *owed += share;
        }
        let most = owed.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        let tier = most.map_or(0, |(tier, _)| tier);
        if let Some(owed) = owed.get_mut(tier) {
            *owed -= 1.0;
        }
        TierMask::only(TierId(u8::try_from(tier).unwrap_or(0)))
    };
    (0..chunks).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(masks: &[TierMask], tier: u8) -> usize {
        masks.iter().filter(|mask| **mask == TierMask::only(TierId(tier))).count()
    }

    #[test]
    fn static_shares_are_kept_in_every_stretch() {
        let masks = Policy::Static(vec![0.75, 0.25]).masks(200, TierId(0));
        for stretch in masks.chunks(20) {
            assert_eq!((count(stretch, 0), count(stretch, 1)), (15, 5));
        }
        let three = Policy::Static(vec![0.5, 0.3, 0.2]).masks(100, TierId(0));
        assert_eq!([0, 1, 2].map(|tier| count(&three, tier)), [50, 30, 20]);
    }

    #[test]
    fn policies_are_read_from_their_names() {
        assert_eq!("kvbraid".parse(), Ok(Policy::Kvbraid));
        assert_eq!("static:0.75,0.25".parse(), Ok(Policy::Static(vec![0.75, 0.25])));
        for text in ["", "fast", "static:", "static:0.5", "static:1.5,-0.5", "static:NaN"] {
            assert!(text.parse::<Policy>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_kvbraid_leaves_the_choice_to_the_tiers() {
        assert_eq!(Policy::FastOnly.masks(3, TierId(1)), [TierMask::only(TierId(1)); 3]);
        assert_eq!(Policy::Serial.masks(3, TierId(1)), [TierMask::only(TierId(1)); 3]);
        assert_eq!(Policy::Kvbraid.masks(3, TierId(1)), [TierMask::all(8); 3]);
    }
}
