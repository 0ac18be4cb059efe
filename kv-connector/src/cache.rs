//! Whole chunks kept in host memory: the least recently used give up their slots.

use std::sync::{Arc, Mutex};

use hashlink::LruCache;
use kv_chunk::{ChunkKey, Digest};
use kv_tiers::Record;

use crate::sync::lock_plain;

/// Records looked at before eviction gives up: those in use are passed over.
const SCAN_MAX: usize = 64;

/// At most `capacity` records. A record that a lease or a load also holds is never given up, so memory that only
/// looks evicted cannot pile up outside.
#[derive(Debug)]
pub(crate) struct HostCache {
    records: Mutex<LruCache<Digest, Arc<Record>>>,
    capacity: usize,
}

impl HostCache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { records: Mutex::new(LruCache::new_unbounded()), capacity }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn len(&self) -> usize {
        lock_plain(&self.records).len()
    }

    /// The chunk of this key; another key with the same digest is not it.
    pub(crate) fn get(&self, key: &ChunkKey) -> Option<Arc<Record>> {
        if self.capacity == 0 {
            return None;
        }
        let record = lock_plain(&self.records).get(&key.digest()).map(Arc::clone)?;
        record.header().verify_key(key).is_ok().then_some(record)
    }

    /// Keeps `record` in place of the least recently used one; if all are in use, it is not kept.
    pub(crate) fn insert(&self, record: Arc<Record>) {
        if self.capacity == 0 {
            return;
        }
        let mut records = lock_plain(&self.records);
        let present = records.contains_key(&record.digest());
        if present || records.len() < self.capacity || evict(&mut records) {
            records.insert(record.digest(), record);
        }
    }

    /// Gives up the least recently used record that nobody uses, and with it its slot.
    pub(crate) fn give_up_one(&self) -> bool {
        evict(&mut lock_plain(&self.records))
    }

    pub(crate) fn remove(&self, digest: Digest) {
        lock_plain(&self.records).remove(&digest);
    }

    /// Drops the records that `selected` names; the number of them.
    pub(crate) fn remove_if(&self, selected: impl Fn(&Record) -> bool) -> u64 {
        let mut records = lock_plain(&self.records);
        let found = records.iter().filter(|(_, record)| selected(record));
        let found: Vec<Digest> = found.map(|(digest, _)| *digest).collect();
        found.iter().for_each(|digest| drop(records.remove(digest)));
        found.len() as u64
    }

    pub(crate) fn clear(&self) {
        lock_plain(&self.records).clear();
    }
}

fn evict(records: &mut LruCache<Digest, Arc<Record>>) -> bool {
    // Clones are made only under this lock, so a count of one stays one.
    let idle = |(_, record): &(&Digest, &Arc<Record>)| Arc::strong_count(record) == 1;
    let victim = records.iter().take(SCAN_MAX).find(idle).map(|(digest, _)| *digest);
    victim.is_some_and(|digest| records.remove(&digest).is_some())
}

#[cfg(test)]
mod tests {
    use kv_chunk::WriteId;
    use kv_tiers::{Arena, ArenaConfig};

    use super::*;
    use crate::testing::key;

    fn records(count: u8) -> (Arc<Arena>, Vec<(ChunkKey, Arc<Record>)>) {
        let arena = Arena::new(ArenaConfig::new(8192, usize::from(count))).unwrap();
        let make = |n| {
            let slot = arena.try_take().unwrap();
            let record = Record::encode(slot, &key(n), WriteId::new(1), &[1; 100]).unwrap();
            (key(n), Arc::new(record))
        };
        let records = (0..u64::from(count)).map(make).collect();
        (arena, records)
    }

    #[test]
    fn the_least_recently_used_record_gives_way_and_frees_its_slot() {
        let (arena, records) = records(3);
        let cache = HostCache::new(2);
        let keys: Vec<_> = records.iter().map(|(key, _)| key.clone()).collect();
        let mut records = records.into_iter().map(|(_, record)| record);
        cache.insert(records.next().unwrap());
        cache.insert(records.next().unwrap());
        assert!(cache.get(&keys[0]).is_some());
        cache.insert(records.next().unwrap());
        assert_eq!((cache.len(), arena.free_slots()), (2, 1));
        assert!(cache.get(&keys[1]).is_none() && cache.get(&keys[0]).is_some());
    }

    #[test]
    fn records_in_use_stay_and_newcomers_are_not_kept() {
        let (arena, records) = records(2);
        let cache = HostCache::new(1);
        let (first, held) = (records[0].0.clone(), Arc::clone(&records[0].1));
        for (_, record) in records {
            cache.insert(record);
        }
        assert!(cache.get(&first).is_some() && !cache.give_up_one());
        assert_eq!(arena.free_slots(), 1);
        drop(held);
        assert!(cache.give_up_one());
        assert_eq!(arena.free_slots(), 2);
    }
}
