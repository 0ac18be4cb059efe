//! Where chunks are, asked from another thread than the one that owns the tier.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use kv_chunk::Digest;

use crate::Place;

/// Where each readable chunk of a [`DaxTier`](crate::DaxTier) is. Clones see the same; the tier keeps it up to date.
///
/// An answer is true when it is given. A chunk can leave at any time, unless somebody keeps the tier from dropping it.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Mutex<HashMap<Digest, Place>>>);

impl Places {
    /// Where a readable chunk is.
    pub fn get(&self, digest: Digest) -> Option<Place> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&digest).copied()
    }

    pub(crate) fn put(&self, digest: Digest, place: Place) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(digest, place);
    }

    pub(crate) fn remove(&self, digest: Digest) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&digest);
    }
}
