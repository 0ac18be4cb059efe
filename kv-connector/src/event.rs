//! What an observer is told.

use std::{fmt, sync::Arc};

use kv_chunk::Digest;

/// A change of what a tier holds. Numbers of tiers follow the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Every byte of the chunk is complete in the tier: it survives a crash if the tier is persistent.
    Published {
        /// Which chunk.
        digest: Digest,
        /// Where.
        tier: u8,
    },
    /// Dropped to make room.
    Evicted {
        /// Which chunk.
        digest: Digest,
        /// Where.
        tier: u8,
    },
    /// Removed by a purge.
    Purged {
        /// Which chunk.
        digest: Digest,
        /// Where.
        tier: u8,
    },
    /// Gone without our doing, or removed because its bytes were damaged.
    Lost {
        /// Which chunk.
        digest: Digest,
        /// Where.
        tier: u8,
    },
}

/// Called on tier threads for every [`Event`]: it must return quickly and not call the engine.
#[derive(Clone)]
pub struct Observer(Arc<dyn Fn(Event) + Send + Sync>);

impl Observer {
    /// An observer that calls `observe`.
    pub fn new(observe: impl Fn(Event) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observe))
    }

    pub(crate) fn tell(&self, event: Event) {
        (self.0)(event);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
