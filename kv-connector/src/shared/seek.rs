//! Looking for chunks that other nodes wrote: a look-up asks the tiers that can know, and waits a little.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kv_chunk::{ChunkKey, Digest};

use super::Shared;
use crate::{sync::lock_plain, tier_handle::TierHandle};

/// What one look-up asks one tier. Whatever becomes of it, the one who waits is told.
#[derive(Debug)]
pub(crate) struct Inquiry {
    pub(crate) digests: Vec<Digest>,
    /// None: nobody waits.
    asker: Option<Arc<Asker>>,
}

impl Inquiry {
    pub(crate) fn is_waited_for(&self) -> bool {
        self.asker.is_some()
    }
}

/// Who waits, and for how many tiers.
#[derive(Debug)]
struct Asker {
    open: Mutex<usize>,
    changed: Condvar,
}

impl Drop for Inquiry {
    fn drop(&mut self) {
        if let Some(asker) = &self.asker {
            *lock_plain(&asker.open) -= 1;
            asker.changed.notify_all();
        }
    }
}

/// What tiers were asked about chunks that nothing here holds; what they know by now serves the next look-up.
#[derive(Debug)]
pub struct Seek {
    asker: Arc<Asker>,
    ends: Instant,
}

impl Seek {
    /// Whether all have answered, or have had [`lookup_wait_ms`](crate::EngineConfig::lookup_wait_ms) for it.
    pub fn is_done(&self) -> bool {
        *lock_plain(&self.asker.open) == 0 || Instant::now() >= self.ends
    }

    /// Returns when that is so.
    fn wait(&self) {
        let left = self.ends.saturating_duration_since(Instant::now());
        let open = lock_plain(&self.asker.open);
        let waited = self.asker.changed.wait_timeout_while(open, left, |open| *open > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Shared {
    /// Has the shared tiers look for those of `keys` that nothing here holds. Returns when they have answered, or after
    /// the configured wait: what is found later serves the next look-up.
    pub(crate) fn seek(&self, keys: &[ChunkKey]) {
        if let Some(seek) = self.ask(keys) {
            seek.wait();
        }
    }

    /// The same without waiting; none if there is nothing to wait for.
    ///
    /// Tiers also look for what only others are known to hold, as after a restart: nobody waits for that, and a step reads
    /// from what is known by then.
    pub(crate) fn ask(&self, keys: &[ChunkKey]) -> Option<Seek> {
        let readable = self.readable();
        let can_know = |tier: &&TierHandle| tier.is_shared && readable >> tier.id.0 & 1 == 1;
        let tiers: Vec<&TierHandle> = self.tiers.iter().filter(can_know).collect();
        if tiers.is_empty() {
            return None;
        }
        let (mut unknown, mut elsewhere) = (Vec::new(), vec![Vec::new(); tiers.len()]);
        for key in keys {
            let digest = key.digest();
            let known = self.directory.tiers(digest) & readable;
            if known != 0 {
                let missing = tiers.iter().map(|tier| known >> tier.id.0 & 1 == 0);
                let lists = elsewhere.iter_mut().zip(missing).filter(|(_, missing)| *missing);
                lists.for_each(|(list, _)| list.push(digest));
            } else if self.in_memory(key).is_none() {
                unknown.push(digest);
            }
        }
        let told = tiers.iter().zip(elsewhere).filter(|(_, digests)| !digests.is_empty());
        told.for_each(|(tier, digests)| tier.push_inquiry(Inquiry { digests, asker: None }));
        (!unknown.is_empty()).then(|| self.ask_all(&tiers, &unknown))
    }

    fn ask_all(&self, tiers: &[&TierHandle], digests: &[Digest]) -> Seek {
        let ends = Instant::now() + Duration::from_millis(self.config.lookup_wait_ms);
        let asker = Arc::new(Asker { open: Mutex::new(tiers.len()), changed: Condvar::new() });
        for tier in tiers {
            let asker = Some(Arc::clone(&asker));
            tier.push_inquiry(Inquiry { digests: digests.to_vec(), asker });
        }
        Seek { asker, ends }
    }

    /// Whether a tier of `readable` or memory holds the chunk.
    pub(crate) fn holds(&self, key: &ChunkKey, readable: u8) -> bool {
        self.directory.tiers(key.digest()) & readable != 0 || self.in_memory(key).is_some()
    }
}
