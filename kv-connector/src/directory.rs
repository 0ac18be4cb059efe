//! Which tiers hold a chunk, and how many leases protect it: decided together, under one lock per shard.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use kv_chunk::Digest;

use crate::sync::{Guard, Mutex, lock};

#[cfg(not(loom))]
const SHARDS: usize = 64;
#[cfg(loom)]
const SHARDS: usize = 1;

/// Digest -> (tier mask, lease count), sharded.
///
/// An eviction and a lease of one chunk are decided under the same lock: either the eviction came first and the lease
/// does not name that tier, or the lease came first and the eviction is refused. Lost bytes are another matter: a lease
/// cannot bring them back, so [`clear`](Directory::clear) always clears.
#[derive(Debug)]
pub(crate) struct Directory {
    shards: Box<[Mutex<Shard>]>,
}

type Shard = HashMap<Digest, Entry, BuildHasherDefault<DigestHasher>>;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Bit n: tier n holds the chunk.
    tiers: u8,
    leases: u32,
}

impl Directory {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect() }
    }

    /// Bit mask of the tiers that hold the chunk.
    pub(crate) fn tiers(&self, digest: Digest) -> u8 {
        self.shard(digest).get(&digest).map_or(0, |entry| entry.tiers)
    }

    /// From now on `tier` is named for the chunk. True if it was not before.
    pub(crate) fn set(&self, digest: Digest, tier: u8) -> bool {
        let mut shard = self.shard(digest);
        let tiers = &mut shard.entry(digest).or_default().tiers;
        let before = *tiers;
        *tiers |= 1 << tier;
        before != *tiers
    }

    /// The chunk is gone from `tier`, leased or not. True if the tier was named for it.
    pub(crate) fn clear(&self, digest: Digest, tier: u8) -> bool {
        let mut shard = self.shard(digest);
        let Some(entry) = shard.get_mut(&digest) else { return false };
        let named = entry.tiers & (1 << tier) != 0;
        entry.tiers &= !(1 << tier);
        drop_if_empty(&mut shard, digest);
        named
    }

    /// Gives `tier` leave to drop its copy unless the chunk is leased; then the tier is no longer named for it.
    pub(crate) fn try_evict(&self, digest: Digest, tier: u8) -> bool {
        let mut shard = self.shard(digest);
        let Some(entry) = shard.get_mut(&digest) else { return true };
        if entry.leases > 0 {
            return false;
        }
        entry.tiers &= !(1 << tier);
        drop_if_empty(&mut shard, digest);
        true
    }

    /// Whether a lease protects the chunk now.
    pub(crate) fn is_leased(&self, digest: Digest) -> bool {
        self.shard(digest).get(&digest).is_some_and(|entry| entry.leases > 0)
    }

    /// Adds a lease if one of `readable` tiers holds the chunk.
    pub(crate) fn lease_resident(&self, digest: Digest, readable: u8) -> bool {
        let mut shard = self.shard(digest);
        match shard.get_mut(&digest) {
            Some(entry) if entry.tiers & readable != 0 => {
                entry.leases = entry.leases.saturating_add(1);
                true
            }
            _ => false,
        }
    }

    /// Adds a lease of a chunk that is in memory, whether or not a tier holds it.
    pub(crate) fn lease(&self, digest: Digest) {
        let mut shard = self.shard(digest);
        let entry = shard.entry(digest).or_default();
        entry.leases = entry.leases.saturating_add(1);
    }

    /// Takes back one lease.
    pub(crate) fn release(&self, digest: Digest) {
        let mut shard = self.shard(digest);
        let Some(entry) = shard.get_mut(&digest) else {
            debug_assert!(false, "released {digest} without a lease");
            return;
        };
        debug_assert!(entry.leases > 0, "released {digest} twice");
        entry.leases = entry.leases.saturating_sub(1);
        drop_if_empty(&mut shard, digest);
    }

    /// `tier` is gone with all it held; gives the digests that named it.
    pub(crate) fn clear_tier(&self, tier: u8) -> u64 {
        let mut cleared = 0;
        for shard in &self.shards {
            lock(shard).retain(|_, entry| {
                cleared += u64::from(entry.tiers >> tier & 1);
                entry.tiers &= !(1 << tier);
                entry.tiers != 0 || entry.leases > 0
            });
        }
        cleared
    }

    /// Number of chunks on any tier, and of those that are leased.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let (mut held, mut leased) = (0, 0);
        for shard in &self.shards {
            for entry in lock(shard).values() {
                held += u64::from(entry.tiers != 0);
                leased += u64::from(entry.leases > 0);
            }
        }
        (held, leased)
    }

    fn shard(&self, digest: Digest) -> Guard<'_, Shard> {
        let [first, ..] = digest.to_bytes();
        lock(&self.shards[usize::from(first) % SHARDS])
    }
}

fn drop_if_empty(shard: &mut Shard, digest: Digest) {
    if shard.get(&digest).is_some_and(|entry| entry.tiers == 0 && entry.leases == 0) {
        shard.remove(&digest);
    }
}

/// A digest is a hash already: eight of its bytes serve.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(tail) = bytes.last_chunk::<8>() {
            self.0 = u64::from_le_bytes(*tail);
        }
    }

    fn write_usize(&mut self, _length_prefix: usize) {}
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn digest(n: u8) -> Digest {
        Digest::from_bytes([n; 16])
    }

    #[test]
    fn a_leased_chunk_is_evicted_only_after_the_last_release() {
        let directory = Directory::new();
        directory.set(digest(1), 0);
        directory.set(digest(1), 2);
        assert!(directory.lease_resident(digest(1), 0b101));
        assert!(directory.lease_resident(digest(1), 0b101));
        assert!(!directory.try_evict(digest(1), 0));
        directory.release(digest(1));
        assert!(directory.is_leased(digest(1)) && !directory.is_leased(digest(2)));
        assert!(!directory.try_evict(digest(1), 0));
        directory.release(digest(1));
        assert!(!directory.is_leased(digest(1)));
        assert!(directory.try_evict(digest(1), 0));
        assert_eq!(directory.tiers(digest(1)), 0b100);
    }

    #[test]
    fn lost_bytes_are_cleared_in_spite_of_a_lease() {
        let directory = Directory::new();
        directory.set(digest(1), 1);
        directory.lease(digest(1));
        assert!(directory.clear(digest(1), 1));
        assert_eq!(directory.tiers(digest(1)), 0);
        assert!(!directory.clear(digest(1), 1));
        directory.release(digest(1));
        assert_eq!(directory.counts(), (0, 0));
    }

    #[test]
    fn chunks_on_unreadable_tiers_are_not_leased() {
        let directory = Directory::new();
        directory.set(digest(1), 1);
        assert!(!directory.lease_resident(digest(1), 0b01));
        assert!(directory.try_evict(digest(1), 1));
    }

    #[test]
    fn nothing_is_kept_for_chunks_that_nobody_holds() {
        let directory = Directory::new();
        for n in 0..200 {
            directory.set(digest(n), 0);
            directory.set(digest(n), 1);
        }
        assert_eq!(directory.clear_tier(0), 200);
        for n in 0..200 {
            assert!(directory.try_evict(digest(n), 1));
        }
        assert!(directory.shards.iter().all(|shard| lock(shard).is_empty()));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    fn resident() -> (Arc<Directory>, Digest) {
        let directory = Arc::new(Directory::new());
        let digest = Digest::from_bytes([7; 16]);
        directory.set(digest, 0);
        directory.set(digest, 1);
        (directory, digest)
    }

    #[test]
    fn loom_a_leased_chunk_is_never_evicted() {
        loom::model(|| {
            let (directory, digest) = resident();
            let evictor = {
                let directory = Arc::clone(&directory);
                thread::spawn(move || directory.try_evict(digest, 0))
            };
            let leased = directory.lease_resident(digest, 0b01);
            let named = directory.tiers(digest) & 1 != 0;
            let evicted = evictor.join().expect("the evictor does not panic");
            assert_ne!(leased, evicted);
            if leased {
                assert!(named && directory.tiers(digest) & 1 != 0);
            }
        });
    }

    #[test]
    fn loom_the_last_release_lets_eviction_succeed() {
        loom::model(|| {
            let (directory, digest) = resident();
            assert!(directory.lease_resident(digest, 0b11));
            let other = {
                let directory = Arc::clone(&directory);
                thread::spawn(move || {
                    let leased = directory.lease_resident(digest, 0b11);
                    assert!(leased && !directory.try_evict(digest, 1));
                    directory.release(digest);
                })
            };
            directory.release(digest);
            other.join().expect("the other holder does not panic");
            assert!(directory.try_evict(digest, 0) && directory.try_evict(digest, 1));
            assert_eq!(directory.counts(), (0, 0));
        });
    }

    #[test]
    fn loom_loss_and_release_race_without_a_trace() {
        loom::model(|| {
            let (directory, digest) = resident();
            directory.lease(digest);
            let loser = {
                let directory = Arc::clone(&directory);
                thread::spawn(move || directory.clear(digest, 0) & directory.clear(digest, 1))
            };
            directory.release(digest);
            assert!(loser.join().expect("the loser does not panic"));
            assert_eq!(directory.counts(), (0, 0));
            assert!(lock(&directory.shards[0]).is_empty());
        });
    }
}
