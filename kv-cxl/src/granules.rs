//! Sets and counts of granules: who shares them, since protection does not nest.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Extent, coalesce};

/// Which granules of an arena have something done to them.
#[derive(Debug)]
pub(crate) struct GranuleSet {
    granule_bytes: u64,
    offsets: BTreeSet<u64>,
}

impl GranuleSet {
    pub(crate) fn new(granule_bytes: u64) -> Self {
        Self { granule_bytes, offsets: BTreeSet::new() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.offsets.len() as u64 * self.granule_bytes
    }

    /// The granules of checked `extents` that are in the set, or are not: each once, in the fewest extents.
    pub(crate) fn select(&self, extents: &[Extent], inside: bool) -> Vec<Extent> {
        let granules = extents.iter().flat_map(|extent| granules(*extent, self.granule_bytes));
        let mut selected: Vec<Extent> = granules
            .filter(|offset| self.offsets.contains(offset) == inside)
            .map(|offset| Extent { offset, bytes: self.granule_bytes })
            .collect();
        coalesce(&mut selected);
        selected
    }

    pub(crate) fn insert(&mut self, extents: &[Extent]) {
        for extent in extents {
            self.offsets.extend(granules(*extent, self.granule_bytes));
        }
    }

    pub(crate) fn remove(&mut self, extents: &[Extent]) {
        for extent in extents {
            for offset in granules(*extent, self.granule_bytes) {
                self.offsets.remove(&offset);
            }
        }
    }
}

/// How many users each granule has: between objects that share granules and a provider whose protection does not nest.
///
/// ```
/// use kv_cxl::{Extent, GranuleCounts};
///
/// let mut pins = GranuleCounts::new(2 << 20);
/// let (one, two) = (Extent { offset: 0, bytes: 3 << 20 }, Extent { offset: 3 << 20, bytes: 1 << 20 });
/// assert_eq!(pins.add(one), [Extent { offset: 0, bytes: 4 << 20 }]); // protect this
/// assert_eq!(pins.add(two), []); // its granule is protected already
/// assert_eq!(pins.remove(one), [Extent { offset: 0, bytes: 2 << 20 }]); // unprotect only this
/// assert_eq!(pins.remove(two), [Extent { offset: 2 << 20, bytes: 2 << 20 }]);
/// ```
#[derive(Clone, Debug)]
pub struct GranuleCounts {
    granule_bytes: u64,
    users: BTreeMap<u64, u32>,
}

impl GranuleCounts {
    /// Nobody uses anything; `granule_bytes` is a power of two.
    pub const fn new(granule_bytes: u64) -> Self {
        Self { granule_bytes, users: BTreeMap::new() }
    }

    /// One more user of every granule that `extent` touches. Returns those that had none: they are to be protected.
    pub fn add(&mut self, extent: Extent) -> Vec<Extent> {
        let mut first = Vec::new();
        for offset in self.granules(extent) {
            let users = self.users.entry(offset).or_insert(0);
            if *users == 0 {
                first.push(Extent { offset, bytes: self.granule_bytes });
            }
            *users += 1;
        }
        coalesce(&mut first);
        first
    }

    /// One user less. Returns the granules that have none any more: their protection is to end. What has no user stays
    /// as it is.
    pub fn remove(&mut self, extent: Extent) -> Vec<Extent> {
        let mut last = Vec::new();
        for offset in self.granules(extent) {
            let Some(users) = self.users.get_mut(&offset) else { continue };
            *users -= 1;
            if *users == 0 {
                self.users.remove(&offset);
                last.push(Extent { offset, bytes: self.granule_bytes });
            }
        }
        coalesce(&mut last);
        last
    }

    /// Bytes of the granules that have a user.
    pub fn bytes(&self) -> u64 {
        self.users.len() as u64 * self.granule_bytes
    }

    fn granules(&self, extent: Extent) -> Vec<u64> {
        granules(extent.widen(self.granule_bytes), self.granule_bytes).collect()
    }
}

/// The offsets of the granules of an extent that consists of them.
fn granules(extent: Extent, granule_bytes: u64) -> impl Iterator<Item = u64> {
    let step = usize::try_from(granule_bytes).unwrap_or(usize::MAX);
    (extent.offset..extent.end().unwrap_or(u64::MAX)).step_by(step)
}
