//! Chunks by digest: a table of places, whose slots hold the digests.

use hashbrown::HashTable;
use kv_chunk::Digest;

use crate::nvme::slots::{Place, Slab};

/// Parts of the table that are filled one after the other.
const REGIONS: usize = 256;

#[derive(Debug)]
pub(super) struct Chunks {
    table: HashTable<Place>,
    /// Nobody can know which digests meet.
    seed: u64,
}

impl Default for Chunks {
    fn default() -> Self {
        Self { table: HashTable::new(), seed: fastrand::u64(..) }
    }
}

/// A digest is a hash: it is mixed with the seed only.
fn hash(seed: u64, digest: Digest) -> u64 {
    let [low, high] = bytemuck::cast::<[u8; 16], [u64; 2]>(digest.to_bytes());
    (low ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ high
}

fn digest_at(slab: &Slab, place: Place) -> Option<Digest> {
    slab.slot(place).map(|slot| slot.digest)
}

impl Chunks {
    pub(super) fn get(&self, slab: &Slab, digest: Digest) -> Option<Place> {
        let hash = hash(self.seed, digest);
        self.table.find(hash, |place| digest_at(slab, *place) == Some(digest)).copied()
    }

    /// Adds a chunk that is not there.
    pub(super) fn insert(&mut self, slab: &Slab, digest: Digest, place: Place) {
        let seed = self.seed;
        let rehash = |place: &Place| digest_at(slab, *place).map_or(0, |digest| hash(seed, digest));
        self.table.insert_unique(hash(seed, digest), place, rehash);
    }

    pub(super) fn remove(&mut self, slab: &Slab, digest: Digest) -> Option<Place> {
        let found = self
            .table
            .find_entry(hash(self.seed, digest), |place| digest_at(slab, *place) == Some(digest));
        found.ok().map(|entry| entry.remove().0)
    }

    /// Fills the empty table with these. Returns those to wipe: of two copies of a chunk, which a kill between a removal
    /// and its wipe leaves, the one used last stays.
    pub(super) fn fill(&mut self, slab: &Slab, places: impl Iterator<Item = Place>) -> Vec<Place> {
        let places: Vec<Place> = places.collect();
        let seed = self.seed;
        self.table = HashTable::with_capacity(places.len());
        // Neighbours in the table one after the other: a million chunks at random places would miss every cache.
        let buckets = (places.len() * 8 / 7).next_power_of_two() as u64;
        let region = |hash: u64| {
            usize::try_from((hash & (buckets - 1)) * REGIONS as u64 / buckets).unwrap_or(0)
        };
        let mut regions = vec![Vec::new(); REGIONS];
        for place in places {
            let Some(slot) = slab.slot(place) else { continue };
            let hash = hash(seed, slot.digest);
            regions[region(hash)].push((hash, place));
        }
        let mut losers = Vec::new();
        for (hash, place) in regions.into_iter().flatten() {
            let same = |known: &Place| digest_at(slab, *known) == digest_at(slab, place);
            let used_at = |place| slab.slot(place).map_or(0, |slot| slot.used_at);
            match self.table.find_mut(hash, same) {
                Some(known) if used_at(*known) >= used_at(place) => losers.push(place),
                Some(known) => losers.push(std::mem::replace(known, place)),
                None => {
                    let rehash = |place: &Place| {
                        digest_at(slab, *place).map_or(0, |digest| self::hash(seed, digest))
                    };
                    self.table.insert_unique(hash, place, rehash);
                }
            }
        }
        losers
    }

    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        self.table.iter().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }
}
