//! Chunks that left a tier, for callers that keep a list of what is held.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use kv_chunk::Digest;

use crate::{Event, Observer, sync::lock_plain};

/// More are forgotten, the oldest first: who keeps a list then believes in some chunks that are not there any more.
const MOST: usize = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct Gone(Mutex<VecDeque<Digest>>);

impl Gone {
    pub(super) fn observer(self: &Arc<Self>) -> Observer {
        let gone = Arc::clone(self);
        Observer::new(move |event| {
            let (Event::Evicted { digest, .. }
            | Event::Purged { digest, .. }
            | Event::Lost { digest, .. }) = event
            else {
                return;
            };
            let mut queue = lock_plain(&gone.0);
            if queue.len() == MOST {
                queue.pop_front();
            }
            queue.push_back(digest);
        })
    }

    pub(super) fn take(&self) -> VecDeque<Digest> {
        std::mem::take(&mut lock_plain(&self.0))
    }
}
