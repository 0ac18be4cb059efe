//! The sequential state: what is staged, and a bounded queue per tier. No lock, no clock, any payload.

use std::collections::{BTreeMap, VecDeque};

use kv_chunk::{Digest, WriteId};

use crate::{
    Refused, TierBacklog, WritebackConfig, WritebackStats,
    replicate::{Replicas, bit, first, tiers_in},
};

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The chunk is readable in that tier.
    Done,
    /// The tier held it already and wrote nothing.
    AlreadyHeld,
    /// The write failed; the tier holds nothing of it.
    Failed,
    /// The write was not attempted.
    Dropped,
}

/// What finishing a write meant for its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// No replica is left to write: the chunk is no longer staged.
    pub last: bool,
    /// Mask of the tiers that hold it.
    pub replicas: u8,
}

impl Finished {
    /// Whether the chunk left staging without any replica.
    pub fn is_lost(&self) -> bool {
        self.last && self.replicas == 0
    }
}

/// What happened to a chunk that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staged {
    /// It is readable from staging and queued for these tiers (a mask; under back-pressure fewer than wanted).
    Accepted {
        /// The tiers.
        replicas: u8,
    },
    /// It is staged already; nothing was copied, and the earlier `write_id` stands.
    AlreadyStaged,
}

/// What is staged. `R` is a handle on the bytes: cloned to readers and writers, dropped with the last replica.
#[derive(Debug)]
pub(crate) struct Pending<R> {
    pub(crate) staged_chunks_max: usize,
    pub(crate) queue_chunks_max: usize,
    /// Ordered, so that a run depends on its inputs only.
    pub(crate) chunks: BTreeMap<Digest, Chunk<R>>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) stats: WritebackStats,
}

#[derive(Debug)]
pub(crate) struct Chunk<R> {
    write_id: WriteId,
    staged_ns: u64,
    /// `None` while its bytes are being copied.
    record: Option<R>,
    pub(crate) replicas: Replicas,
}

/// One tier's queue.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Chunks that are copied and wait, oldest first. Each has this tier's `queued` bit.
    pub(crate) queue: VecDeque<Digest>,
    /// Chunks handed out and not finished: as few as the tier's window. Each has this tier's `writing` bit.
    writing: Vec<Digest>,
    /// Chunks with this tier's `queued` or `writing` bit, those still being copied included.
    pub(crate) places: usize,
    pub(crate) accepts: bool,
}

impl<R: Clone> Pending<R> {
    pub(crate) fn new(config: &WritebackConfig) -> Self {
        let lane =
            || Lane { queue: VecDeque::new(), writing: Vec::new(), places: 0, accepts: true };
        Self {
            staged_chunks_max: config.staged_chunks_max,
            queue_chunks_max: config.queue_chunks_max,
            chunks: BTreeMap::new(),
            lanes: (0..config.tiers).map(|_| lane()).collect(),
            stats: WritebackStats::default(),
        }
    }

    /// Takes a place for a chunk whose bytes are about to be copied; [`commit`](Self::commit) or
    /// [`abandon`](Self::abandon) follows.
    pub(crate) fn reserve(
        &mut self,
        digest: Digest,
        write_id: WriteId,
        wanted: u8,
        now_ns: u64,
    ) -> Result<Staged, Refused> {
        if self.chunks.contains_key(&digest) {
            self.stats.already_staged += 1;
            return Ok(Staged::AlreadyStaged);
        }
        let accepting = wanted & self.accepting();
        let queued = self.make_room(accepting)?;
        for lane in tiers_in(queued) {
            self.lanes[usize::from(lane)].places += 1;
        }
        self.stats.replicas_wanted += u64::from(accepting.count_ones());
        self.stats.replicas_given_up += u64::from((accepting & !queued).count_ones());
        let replicas = Replicas { queued, ..Replicas::default() };
        self.chunks.insert(digest, Chunk { write_id, staged_ns: now_ns, record: None, replicas });
        self.stats.pending_max = self.stats.pending_max.max(self.chunks.len());
        Ok(Staged::Accepted { replicas: queued })
    }

    /// The bytes are copied: the chunk is readable and queued from now on. Refused if meanwhile its tiers went away.
    pub(crate) fn commit(&mut self, digest: Digest, record: R) -> Result<u8, Refused> {
        let chunk = self.chunks.get_mut(&digest).expect("a reserved chunk stays until its commit");
        let queued = chunk.replicas.queued;
        if queued == 0 {
            self.chunks.remove(&digest);
            return Err(Refused::NoTier);
        }
        chunk.record = Some(record);
        for tier in tiers_in(queued) {
            self.lanes[usize::from(tier)].queue.push_back(digest);
        }
        self.stats.staged += 1;
        Ok(queued)
    }

    /// The bytes were not copied: gives the reserved place back, as if nothing had been offered.
    pub(crate) fn abandon(&mut self, digest: Digest) {
        let Some(chunk) = self.chunks.remove(&digest) else { return };
        for tier in tiers_in(chunk.replicas.queued) {
            self.lanes[usize::from(tier)].places -= 1;
            self.stats.replicas_withdrawn += 1;
        }
    }

    pub(crate) fn get(&self, digest: Digest) -> Option<&R> {
        self.chunks.get(&digest)?.record.as_ref()
    }

    /// When the chunk at the head of a tier's queue was staged.
    pub(crate) fn oldest_queued_ns(&self, tier: u8) -> Option<u64> {
        let lane = self.lanes.get(usize::from(tier))?;
        Some(self.chunks.get(lane.queue.front()?)?.staged_ns)
    }

    /// When the oldest chunk that a tier has to write, handed out or not, was staged.
    pub(crate) fn oldest_unfinished_ns(&self, tier: u8) -> Option<u64> {
        let lane = self.lanes.get(usize::from(tier))?;
        let oldest = lane.writing.iter().chain(lane.queue.front());
        oldest.map(|digest| self.chunks[digest].staged_ns).min()
    }

    /// Hands the head of a tier's queue out for writing.
    pub(crate) fn start(&mut self, tier: u8) -> Option<R> {
        let lane = self.lanes.get_mut(usize::from(tier))?;
        let digest = lane.queue.pop_front()?;
        lane.writing.push(digest);
        let chunk = self.chunks.get_mut(&digest).expect("a queued chunk is staged");
        chunk.replicas.queued &= !bit(tier);
        chunk.replicas.writing |= bit(tier);
        chunk.record.clone()
    }

    /// Takes a handed-out chunk back to the head of its queue: the tier had no room for the op.
    pub(crate) fn requeue(&mut self, tier: u8, digest: Digest, write_id: WriteId) -> bool {
        if self.writing(tier, digest, write_id).is_none() {
            self.stats.finishes_ignored += 1;
            return false;
        }
        let lane = &mut self.lanes[usize::from(tier)];
        if !lane.accepts {
            self.settle(tier, digest, Written::Dropped);
            return false;
        }
        lane.writing.retain(|written| *written != digest);
        lane.queue.push_front(digest);
        let chunk = self.chunks.get_mut(&digest).expect("found above");
        chunk.replicas.writing &= !bit(tier);
        chunk.replicas.queued |= bit(tier);
        true
    }

    /// A handed-out write ended. One that nobody waits for changes nothing.
    pub(crate) fn finish(
        &mut self,
        tier: u8,
        digest: Digest,
        write_id: WriteId,
        outcome: Written,
    ) -> Finished {
        if self.writing(tier, digest, write_id).is_none() {
            self.stats.finishes_ignored += 1;
            return Finished { last: false, replicas: 0 };
        }
        self.settle(tier, digest, outcome)
    }

    /// From now on the tier is handed nothing; what it was handed still finishes. Names chunks lost by that.
    pub(crate) fn stop_writes(&mut self, tier: u8) -> Vec<Digest> {
        self.withdraw(tier, |replicas| replicas.queued)
    }

    /// The tier vanished: nothing that it was handed will finish, nothing that it held counts.
    pub(crate) fn tier_gone(&mut self, tier: u8) -> Vec<Digest> {
        for chunk in self.chunks.values_mut() {
            chunk.replicas.done &= !bit(tier);
        }
        self.withdraw(tier, Replicas::outstanding)
    }

    pub(crate) fn tier_back(&mut self, tier: u8) {
        if let Some(lane) = self.lanes.get_mut(usize::from(tier)) {
            lane.accepts = true;
        }
    }

    pub(crate) fn stats(&self) -> WritebackStats {
        let backlog = |lane: &Lane| TierBacklog {
            queued: lane.queue.len(),
            writing: lane.writing.len(),
            accepts: lane.accepts,
        };
        WritebackStats {
            pending: self.chunks.len(),
            oldest_staged_ns: self.chunks.values().map(|chunk| chunk.staged_ns).min(),
            tiers: self.lanes.iter().map(backlog).collect(),
            ..self.stats.clone()
        }
    }

    fn accepting(&self) -> u8 {
        let all = first(u8::try_from(self.lanes.len()).unwrap_or(u8::MAX));
        tiers_in(all).filter(|tier| self.lanes[usize::from(*tier)].accepts).map(bit).sum()
    }

    fn writing(&self, tier: u8, digest: Digest, write_id: WriteId) -> Option<&Chunk<R>> {
        let chunk = self.chunks.get(&digest)?;
        let is_it = chunk.write_id == write_id && chunk.replicas.writing & bit(tier) != 0;
        is_it.then_some(chunk)
    }

    fn withdraw(&mut self, tier: u8, which: impl Fn(Replicas) -> u8) -> Vec<Digest> {
        let Some(lane) = self.lanes.get_mut(usize::from(tier)) else { return Vec::new() };
        lane.accepts = false;
        lane.queue.clear();
        let hit = |chunk: &Chunk<R>| which(chunk.replicas) & bit(tier) != 0;
        let hits: Vec<Digest> =
            self.chunks.iter().filter(|(_, chunk)| hit(chunk)).map(|(digest, _)| *digest).collect();
        let settled = hits.into_iter().map(|it| (it, self.settle(tier, it, Written::Dropped)));
        settled.filter(|(_, finished)| finished.is_lost()).map(|(digest, _)| digest).collect()
    }

    /// Ends one outstanding replica, and with the last one the chunk's staging.
    pub(crate) fn settle(&mut self, tier: u8, digest: Digest, outcome: Written) -> Finished {
        let chunk = self.chunks.get_mut(&digest).expect("the caller found an outstanding replica");
        let replicas = &mut chunk.replicas;
        debug_assert!(replicas.outstanding() & bit(tier) != 0, "settled once");
        replicas.queued &= !bit(tier);
        replicas.writing &= !bit(tier);
        let count = match outcome {
            Written::Done => &mut self.stats.replicas_written,
            Written::AlreadyHeld => &mut self.stats.replicas_already_held,
            Written::Failed => &mut self.stats.replicas_failed,
            Written::Dropped => &mut self.stats.replicas_withdrawn,
        };
        *count += 1;
        if matches!(outcome, Written::Done | Written::AlreadyHeld) {
            replicas.done |= bit(tier);
        }
        let lane = &mut self.lanes[usize::from(tier)];
        lane.writing.retain(|written| *written != digest);
        lane.places -= 1;
        self.release_if_finished(digest)
    }

    /// Drops the chunk if no replica of it is left to write.
    pub(crate) fn release_if_finished(&mut self, digest: Digest) -> Finished {
        let chunk = self.chunks.get(&digest).expect("a chunk leaves only here or by its stager");
        let replicas = chunk.replicas;
        // A chunk still being copied is its stager's: commit or abandon ends it.
        let last = replicas.outstanding() == 0 && chunk.record.is_some();
        if last {
            self.chunks.remove(&digest);
            self.stats.lost_writes += u64::from(replicas.done == 0);
        }
        Finished { last, replicas: replicas.done }
    }
}
