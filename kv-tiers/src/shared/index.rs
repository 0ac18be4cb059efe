//! What this node knows: chunks that are there, and chunks that were not there a moment ago.

use hashlink::LinkedHashMap;
use kv_chunk::Digest;

use crate::Held;

/// A chunk that is there as far as this node knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) held: Held,
    /// Not written since this tier was opened.
    pub(super) found: bool,
    /// When its file was last touched, or written, by this node.
    pub(super) touched_ns: Option<u64>,
    /// The counting during which that was.
    pub(super) touched_round: u64,
}

/// Both bounded.
#[derive(Debug)]
pub(super) struct Index {
    /// Least recently met first.
    chunks: LinkedHashMap<Digest, Entry>,
    /// Until when, in the order of entry.
    absent: LinkedHashMap<Digest, u64>,
    absent_max: usize,
    found: u64,
}

impl Index {
    pub(super) fn new(absent_max: usize) -> Self {
        Self { chunks: LinkedHashMap::new(), absent: LinkedHashMap::new(), absent_max, found: 0 }
    }

    pub(super) fn get(&self, digest: Digest) -> Option<&Entry> {
        self.chunks.get(&digest)
    }

    pub(super) fn get_mut(&mut self, digest: Digest) -> Option<&mut Entry> {
        self.chunks.get_mut(&digest)
    }

    /// The entry, now the one met most recently.
    pub(super) fn meet(&mut self, digest: Digest) -> Option<&mut Entry> {
        self.chunks.to_back(&digest)
    }

    pub(super) fn insert(&mut self, digest: Digest, entry: Entry) {
        self.absent.remove(&digest);
        self.found += u64::from(entry.found);
        if let Some(old) = self.chunks.insert(digest, entry) {
            self.found -= u64::from(old.found);
        }
    }

    pub(super) fn remove(&mut self, digest: Digest) -> Option<Entry> {
        let entry = self.chunks.remove(&digest)?;
        self.found -= u64::from(entry.found);
        Some(entry)
    }

    pub(super) fn oldest(&self) -> Option<Digest> {
        self.chunks.front().map(|(digest, _)| *digest)
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn found(&self) -> u64 {
        self.found
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Digest, Held)> {
        self.chunks.iter().map(|(digest, entry)| (*digest, entry.held))
    }

    pub(super) fn set_absent(&mut self, digest: Digest, until_ns: u64) {
        self.absent.remove(&digest);
        self.absent.insert(digest, until_ns);
        if self.absent.len() > self.absent_max {
            self.absent.pop_front();
        }
    }

    pub(super) fn forget_absent(&mut self, digest: Digest) {
        self.absent.remove(&digest);
    }

    pub(super) fn is_absent(&mut self, digest: Digest, now_ns: u64) -> bool {
        match self.absent.get(&digest) {
            Some(until_ns) if now_ns < *until_ns => true,
            Some(_) => {
                self.absent.remove(&digest);
                false
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_chunk::WriteId;

    use super::*;

    fn digest(n: u8) -> Digest {
        Digest::from_bytes([n; 16])
    }

    #[test]
    fn absence_is_bounded_in_time_and_number() {
        let mut index = Index::new(2);
        for n in 0..3 {
            index.set_absent(digest(n), 10);
        }
        assert!(!index.is_absent(digest(0), 0), "the oldest made room");
        assert!(index.is_absent(digest(2), 9) && !index.is_absent(digest(2), 10));
        let held = Held { payload_bytes: 1, write_id: WriteId::new(1) };
        index.insert(digest(1), Entry { held, found: true, touched_ns: None, touched_round: 0 });
        assert!(!index.is_absent(digest(1), 0), "it is there now");
        assert_eq!((index.found(), index.len()), (1, 1));
    }
}
