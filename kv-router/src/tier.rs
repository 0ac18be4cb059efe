//! Tiers by number, and sets of them.

use core::fmt;

/// The most tiers one pool can route over.
pub const MAX_TIERS: u8 = 8;

/// A storage tier of the node, by its number in `0..MAX_TIERS`. Any value is legal; a number of
/// [`MAX_TIERS`] or more names no tier and is a member of no [`TierMask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TierId(pub u8);

impl TierId {
    /// The number as an array index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for TierId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tier {}", self.0)
    }
}

/// A set of tiers, one bit a tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TierMask(u8);

impl TierMask {
    /// No tier.
    pub const EMPTY: Self = Self(0);

    /// The tiers `0..tiers`; all of them for `tiers >= MAX_TIERS`.
    #[must_use]
    pub fn all(tiers: u8) -> Self {
        Self(1_u8.checked_shl(u32::from(tiers)).map_or(u8::MAX, |bit| bit - 1))
    }

    /// This tier alone; empty if the number names no tier.
    #[must_use]
    pub fn only(tier: TierId) -> Self {
        Self(1_u8.checked_shl(u32::from(tier.0)).unwrap_or(0))
    }

    /// The set with bit `t` for tier `t`.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Bit `t` is tier `t`.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Whether the tier is a member.
    #[must_use]
    pub fn contains(self, tier: TierId) -> bool {
        self.0 & Self::only(tier).0 != 0
    }

    /// The set and this tier.
    #[must_use]
    pub fn with(self, tier: TierId) -> Self {
        Self(self.0 | Self::only(tier).0)
    }

    /// The set without this tier.
    #[must_use]
    pub fn without(self, tier: TierId) -> Self {
        Self(self.0 & !Self::only(tier).0)
    }

    /// Members of either.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Members of both.
    #[must_use]
    pub const fn intersect(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Members of this set that are not in `other`.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// How many tiers.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The member with the lowest number.
    #[must_use]
    pub fn first(self) -> Option<TierId> {
        self.iter().next()
    }

    /// The members in ascending order.
    pub fn iter(self) -> impl Iterator<Item = TierId> {
        (0..MAX_TIERS).map(TierId).filter(move |&tier| self.contains(tier))
    }
}

impl FromIterator<TierId> for TierMask {
    fn from_iter<I: IntoIterator<Item = TierId>>(tiers: I) -> Self {
        tiers.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl fmt::Debug for TierMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(|tier| tier.0)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_follow_their_members() {
        let mask = TierMask::only(TierId(1)).with(TierId(7));
        assert_eq!(mask.iter().collect::<Vec<_>>(), [TierId(1), TierId(7)]);
        assert_eq!(mask.without(TierId(1)), TierMask::only(TierId(7)));
        assert_eq!(TierMask::all(3).minus(mask).len(), 2);
        assert_eq!(TierMask::all(8).len(), 8);
        assert_eq!(TierMask::all(200), TierMask::all(8));
        assert!(TierMask::all(0).is_empty());
        assert_eq!([TierId(2), TierId(2)].into_iter().collect::<TierMask>().bits(), 4);
    }

    #[test]
    fn numbers_past_the_last_tier_are_never_members() {
        assert!(TierMask::only(TierId(8)).is_empty());
        assert!(!TierMask::all(8).contains(TierId(8)));
        assert_eq!(TierMask::EMPTY.with(TierId(255)), TierMask::EMPTY);
    }
}
