//! Leases by key, for callers that say lock and unlock rather than hold a value.

use std::{collections::HashMap, process, sync::Mutex};

use kv_chunk::{ChunkKey, Digest};

use crate::{Engine, Lease, sync::lock_plain};

/// Counted leases: a chunk that was locked twice is protected until it was unlocked twice.
#[derive(Debug)]
pub struct LockTable {
    held: Mutex<HashMap<Digest, Vec<Lease>>>,
    owner_pid: u32,
}

impl Default for LockTable {
    fn default() -> Self {
        Self { held: Mutex::default(), owner_pid: process::id() }
    }
}

impl LockTable {
    /// Looks the chunks up and locks those that are readable; one answer per key.
    pub fn lock(&self, engine: &Engine, keys: &[ChunkKey]) -> Vec<bool> {
        if process::id() != self.owner_pid {
            return vec![false; keys.len()];
        }
        let lease = engine.lookup(keys);
        let hits = lease.hits().to_vec();
        let mut held = lock_plain(&self.held);
        for (key, lease) in keys.iter().zip(lease.split()) {
            if let Some(lease) = lease {
                held.entry(key.digest()).or_default().push(lease);
            }
        }
        hits
    }

    /// Takes back one lock of each chunk; the number of chunks that were not locked, for which nothing is done.
    pub fn unlock(&self, keys: &[ChunkKey]) -> usize {
        if process::id() != self.owner_pid {
            return keys.len();
        }
        let (mut released, mut strangers) = (Vec::with_capacity(keys.len()), 0);
        let mut held = lock_plain(&self.held);
        for key in keys {
            let digest = key.digest();
            let leases = held.get_mut(&digest);
            match leases.and_then(|leases| leases.pop()) {
                Some(lease) => released.push(lease),
                None => strangers += 1,
            }
            if held.get(&digest).is_some_and(Vec::is_empty) {
                held.remove(&digest);
            }
        }
        drop(held);
        strangers
    }

    /// Chunks that are locked.
    pub fn len(&self) -> usize {
        if process::id() == self.owner_pid { lock_plain(&self.held).len() } else { 0 }
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes back all locks.
    pub fn clear(&self) {
        if process::id() == self.owner_pid {
            let held = std::mem::take(&mut *lock_plain(&self.held));
            drop(held);
        }
    }
}
