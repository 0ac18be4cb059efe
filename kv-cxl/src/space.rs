//! Which bytes of a medium are free.

use std::collections::BTreeMap;

use crate::Extent;

/// Free extents of one range; what is given back is merged with its neighbours.
#[derive(Debug)]
pub(crate) struct Space {
    whole: Extent,
    align_bytes: u64,
    /// Length by offset: sorted, apart, none empty.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
}

impl Space {
    /// All of `whole` is free; places begin and end at multiples of `align_bytes`.
    pub(crate) fn new(whole: Extent, align_bytes: u64) -> Self {
        let start = whole.offset.next_multiple_of(align_bytes);
        let end = whole.end().unwrap_or(u64::MAX) / align_bytes * align_bytes;
        let bytes = end.saturating_sub(start);
        let free: BTreeMap<u64, u64> = (bytes > 0).then_some((start, bytes)).into_iter().collect();
        Self { whole: Extent { offset: start, bytes }, align_bytes, free, free_bytes: bytes }
    }

    /// Bytes of all places.
    pub(crate) fn bytes(&self) -> u64 {
        self.whole.bytes
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.whole.bytes - self.free_bytes
    }

    /// The place that `bytes` need.
    pub(crate) fn rounded(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.align_bytes)
    }

    /// The smallest free extent that holds `bytes`, the first of several: large ones stay whole for large chunks.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Extent> {
        let bytes = self.rounded(bytes);
        let fitting = self.free.iter().filter(|(_, free)| **free >= bytes);
        let offset = fitting.min_by_key(|(offset, free)| (**free, **offset)).map(|(at, _)| *at)?;
        let extent = Extent { offset, bytes };
        self.take_at(extent).then_some(extent)
    }

    /// Takes this very place; false: some of it is taken, or not a place.
    pub(crate) fn take_at(&mut self, extent: Extent) -> bool {
        let Some(end) = extent.end() else { return false };
        let is_place = extent.bytes > 0
            && extent.offset.is_multiple_of(self.align_bytes)
            && extent.bytes.is_multiple_of(self.align_bytes);
        let Some((&start, &free)) = self.free.range(..=extent.offset).next_back() else {
            return false;
        };
        if !is_place || end > start + free {
            return false;
        }
        self.free.remove(&start);
        if extent.offset > start {
            self.free.insert(start, extent.offset - start);
        }
        if start + free > end {
            self.free.insert(end, start + free - end);
        }
        self.free_bytes -= extent.bytes;
        true
    }

    /// Gives back a place that was taken.
    pub(crate) fn give(&mut self, extent: Extent) {
        let (mut start, mut bytes) = (extent.offset, extent.bytes);
        self.free_bytes += bytes;
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            self.free.remove(&before);
            (start, bytes) = (before, free + bytes);
        }
        if let Some(free) = self.free.remove(&(start + bytes)) {
            bytes += free;
        }
        self.free.insert(start, bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn places_never_overlap_and_come_back_whole(sizes in vec((1..9_u64, any::<bool>()), 1..60)) {
            let mut space = Space::new(Extent { offset: 3, bytes: 101 }, 4);
            prop_assert_eq!(space.bytes(), 100);
            let mut taken: Vec<Extent> = Vec::new();
            for (bytes, give) in sizes {
                if give && !taken.is_empty() {
                    space.give(taken.swap_remove(usize::try_from(bytes).unwrap() % taken.len()));
                } else if let Some(place) = space.take(bytes) {
                    prop_assert!(place.bytes >= bytes && place.bytes % 4 == 0);
                    prop_assert!(place.offset >= 4 && place.offset + place.bytes <= 104);
                    prop_assert!(taken.iter().all(|other| !other.overlaps(place)));
                    prop_assert!(!space.take_at(place));
                    taken.push(place);
                }
                let used: u64 = taken.iter().map(|place| place.bytes).sum();
                prop_assert_eq!(space.used_bytes(), used);
            }
            taken.into_iter().for_each(|place| space.give(place));
            prop_assert_eq!(space.take(100), Some(Extent { offset: 4, bytes: 100 }));
        }
    }

    #[test]
    fn a_place_outside_is_not_given_out() {
        let mut space = Space::new(Extent { offset: 8, bytes: 8 }, 4);
        for (offset, bytes) in [(0, 4), (4, 8), (12, 8), (9, 4), (8, 0), (u64::MAX, 4)] {
            assert!(!space.take_at(Extent { offset, bytes }), "{offset} {bytes}");
        }
        assert!(space.take_at(Extent { offset: 8, bytes: 8 }));
    }
}
