//! Looking for chunks that other nodes wrote: asked for by digest, in batches, without listing anything.

use std::collections::{HashSet, VecDeque};

use kv_chunk::Digest;

use super::{SharedTier, index::Entry, jobs::Job, ops::Running};
use crate::{Held, Located, TierError};

/// Digests that one thread looks for in one go.
const BATCH: usize = 16;
/// Digests that are asked for and not answered; beyond, the answer is "absent".
const ASKED_MAX: usize = 16_384;

/// Questions without an answer.
#[derive(Debug, Default)]
pub(super) struct Looks {
    asked: HashSet<Digest>,
    queue: VecDeque<Digest>,
}

impl Looks {
    /// The chunk has been dealt with otherwise: an answer that comes is out of date.
    pub(super) fn cancel(&mut self, digest: Digest) {
        self.asked.remove(&digest);
    }
}

impl SharedTier {
    pub(super) fn look_for(&mut self, digest: Digest, now_ns: u64) -> Located {
        if let Some(entry) = self.index.get(digest) {
            return Located::Held(entry.held);
        }
        let timeout_ns = self.config.lookup_timeout_ns;
        let hangs = self.lanes.as_ref().is_none_or(|(_, small)| small.is_hung(now_ns, timeout_ns));
        if self.closed
            || self.is_foreign_process()
            || hangs
            || self.doomed.contains_key(&digest)
            || self.index.is_absent(digest, now_ns)
        {
            return Located::Absent;
        }
        if !self.looks.asked.contains(&digest) {
            if self.looks.asked.len() >= ASKED_MAX {
                return Located::Absent;
            }
            self.looks.asked.insert(digest);
            self.looks.queue.push_back(digest);
            self.raise_wake();
        }
        Located::Asked
    }

    pub(super) fn start_looks(&mut self, now_ns: u64) {
        while !self.looks.queue.is_empty()
            && self.lanes.as_ref().is_some_and(|(_, small)| small.has_room())
        {
            let batch = self.looks.queue.len().min(BATCH);
            let looks = &mut self.looks;
            let asked = looks.queue.drain(..batch).filter(|digest| looks.asked.contains(digest));
            let digests: Vec<Digest> = asked.collect();
            let key = self.next_key();
            self.running.insert(key, Running::Look);
            if let Some((_, small)) = &mut self.lanes {
                small.send(key, Job::Look(digests), now_ns);
            }
        }
    }

    pub(super) fn take_answers(
        &mut self,
        answers: Vec<(Digest, Result<Option<Held>, TierError>)>,
        now_ns: u64,
    ) {
        let until_ns = now_ns.saturating_add(self.config.absent_ttl_ns.max(1_000_000));
        for (digest, answer) in answers {
            if !self.looks.asked.remove(&digest) {
                continue;
            }
            self.detail.looked_for += 1;
            match answer {
                Ok(Some(held)) if self.index.get(digest).is_none() => {
                    self.detail.found += 1;
                    let entry = Entry { held, found: true, touched_ns: None, touched_round: 0 };
                    self.index.insert(digest, entry);
                }
                Ok(Some(_)) => {}
                Ok(None) => self.index.set_absent(digest, until_ns),
                Err(error) => {
                    tracing::debug!(tier = self.config.name, %digest, %error, "look-up failed");
                    self.stats.count_error(error.kind());
                    self.index.set_absent(digest, until_ns);
                }
            }
        }
    }
}
