//! One submitted load: what it wants, what it has got, and who waits.

use std::{
    fmt, mem,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kv_tiers::Slot;

use super::Wanted;
use crate::{Arrived, flash::Retrieving, sync::lock_plain};

/// A chunk that was read, shared by the loads that want it.
pub(super) enum Landed {
    /// Where the engine verified it.
    Whole(Arrived),
    /// Put together, or moved out of the engine's way.
    Copied {
        /// Memory of the queue.
        slot: Slot,
        /// As many of it.
        bytes: usize,
    },
}

impl Landed {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Whole(arrived) => arrived.bytes(),
            // In a forked child a slot is empty.
            Self::Copied { slot, bytes } => slot.get(..*bytes).unwrap_or_default(),
        }
    }
}

pub(super) struct Task {
    pub(super) wants: Vec<Wanted>,
    progress: Mutex<Progress>,
    /// Something landed, or it ended.
    changed: Condvar,
    /// Held by the one who hands over.
    taking: Mutex<()>,
}

struct Progress {
    /// To be handed over, with their places.
    landed: Vec<(usize, Arc<Landed>)>,
    /// Handed over, by place.
    taken: Vec<bool>,
    /// Wants without an answer.
    open: usize,
    /// Since when nothing is added any more.
    done_at: Option<Instant>,
    /// The answer was given.
    answered: bool,
    /// Claims on what it wants, used until it ends: what landed is in memory of ours.
    retrieving: Option<Retrieving>,
}

/// What an answer brought.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Settled {
    /// The load has ended by it.
    pub(super) has_ended: bool,
    /// There is something to take, and there was nothing.
    pub(super) is_first: bool,
}

impl Progress {
    /// True if it was open.
    fn close(&mut self) -> bool {
        let was_open = self.done_at.is_none();
        if was_open {
            self.done_at = Some(Instant::now());
            self.retrieving = None;
        }
        was_open
    }
}

impl Task {
    pub(super) fn new(wants: Vec<Wanted>, retrieving: Option<Retrieving>) -> Self {
        let open = wants.len();
        let progress = Progress {
            landed: Vec::new(),
            taken: vec![false; open],
            open,
            done_at: (open == 0).then(Instant::now),
            answered: false,
            retrieving,
        };
        let progress = Mutex::new(progress);
        Self { wants, progress, changed: Condvar::new(), taking: Mutex::default() }
    }

    /// The answer for one want.
    pub(super) fn settle(&self, place: usize, chunk: Option<Arc<Landed>>) -> Settled {
        let mut progress = lock_plain(&self.progress);
        if progress.done_at.is_some() {
            return Settled::default();
        }
        let is_first = chunk.is_some() && progress.landed.is_empty();
        progress.landed.extend(chunk.map(|chunk| (place, chunk)));
        progress.open -= 1;
        let has_ended = progress.open == 0 && progress.close();
        drop(progress);
        self.changed.notify_all();
        Settled { has_ended, is_first }
    }

    /// Ends it with what it has got. True if it had not ended.
    pub(super) fn end(&self) -> bool {
        let was_open = lock_plain(&self.progress).close();
        self.changed.notify_all();
        was_open
    }

    /// Nobody takes it any more.
    pub(super) fn abandon(&self) {
        let mut progress = lock_plain(&self.progress);
        progress.close();
        let landed = mem::take(&mut progress.landed);
        drop(progress);
        drop(landed);
    }

    pub(super) fn is_done(&self) -> bool {
        lock_plain(&self.progress).done_at.is_some()
    }

    /// Abandons it if it ended longer ago than `keep`; whether it did.
    pub(super) fn expire(&self, keep: Duration) -> bool {
        let done_at = lock_plain(&self.progress).done_at;
        let is_over = done_at.is_some_and(|at| at.elapsed() > keep);
        if is_over {
            self.abandon();
        }
        is_over
    }

    /// Waits until there is something to hand over or it has ended, `limit` at most; whether one is so.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let nothing = |it: &mut Progress| it.done_at.is_none() && it.landed.is_empty();
        let progress = lock_plain(&self.progress);
        let waited = self.changed.wait_timeout_while(progress, limit, nothing);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Hands over what has landed; once it has ended, also which wants were handed over.
    pub(super) fn take(&self, mut copy: impl FnMut(usize, &[u8])) -> Option<Vec<bool>> {
        let _one = lock_plain(&self.taking);
        loop {
            let landed = mem::take(&mut lock_plain(&self.progress).landed);
            for (place, chunk) in &landed {
                copy(*place, chunk.bytes());
            }
            let mut progress = lock_plain(&self.progress);
            for (place, _) in &landed {
                progress.taken[*place] = true;
            }
            progress.done_at?;
            if progress.landed.is_empty() {
                // A second answer would be of other memory.
                let missed = vec![false; self.wants.len()];
                let again = mem::replace(&mut progress.answered, true);
                return Some(if again { missed } else { progress.taken.clone() });
            }
        }
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("wants", &self.wants.len()).finish_non_exhaustive()
    }
}
