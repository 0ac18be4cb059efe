//! Room: removals, the leader's counting, and whom it drops.

use std::{collections::HashMap, ffi::OsString};

use kv_chunk::Digest;

use super::{
    SharedTier,
    config::OpenAs,
    inspect::{Discarded, If},
    jobs::{Job, Scan},
    lease::Beat,
    ops::{QueuedWrite, Running},
    paths::Fan,
    space::signed,
};
use crate::{Completion, EvictionGuard, TierError};

/// A chunk on its way out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doom {
    condition: If,
    /// What its file counts with.
    bytes: u64,
    /// It was dropped to make room.
    evicted: bool,
    running: bool,
}

/// Whether a write may begin.
pub(super) enum Room {
    Enough,
    /// After removals, or a counting, that are in progress.
    Soon,
    None,
}

/// Removals that wait; more victims are not chosen.
const REMOVALS_MAX: usize = 256;
/// Temporaries remembered between countings.
const TEMPORARIES_MAX: usize = 1 << 16;

impl SharedTier {
    /// Makes a chunk unreadable here, and removes its file once reads of it have ended. `bytes`: dropped to make room,
    /// and so many will be free.
    pub(super) fn doom(&mut self, digest: Digest, condition: If, bytes: u64) {
        self.looks.cancel(digest);
        self.index.forget_absent(digest);
        self.space.leaving += bytes;
        let evicted = bytes > 0;
        self.doomed.insert(digest, Doom { condition, bytes, evicted, running: false });
        self.raise_wake();
    }

    pub(super) fn start_removals(&mut self, now_ns: u64) {
        let ready = |(digest, doom): (&Digest, &Doom)| {
            let busy = self.readers.contains_key(digest) || self.writing.contains(digest);
            (!doom.running && !busy).then_some((*digest, doom.condition))
        };
        let ready: Vec<(Digest, If)> = self.doomed.iter().filter_map(ready).collect();
        for (digest, condition) in ready {
            let Some((_, small)) = self.lanes.as_mut().filter(|(_, small)| small.has_room()) else {
                return;
            };
            self.next_key += 1;
            small.send(self.next_key, Job::Discard { digest, condition }, now_ns);
            self.running.insert(self.next_key, Running::Discard { digest });
            self.space.change_begins(Fan::of(digest), 0);
            if let Some(doom) = self.doomed.get_mut(&digest) {
                doom.running = true;
            }
        }
    }

    pub(super) fn removal_ended(&mut self, digest: Digest, result: Result<Discarded, TierError>) {
        let Some(doom) = self.doomed.remove(&digest) else { return };
        self.looks.cancel(digest);
        self.space.removed(digest);
        self.space.leaving =
            self.space.leaving.saturating_sub(if doom.evicted { doom.bytes } else { 0 });
        let removed = match result {
            Ok(Discarded::Removed(bytes)) => {
                self.detail.torn_removed += u64::from(doom.condition == If::Torn);
                self.stats.evictions += u64::from(doom.evicted);
                bytes
            }
            // If somebody else has removed it, the next counting tells.
            Ok(Discarded::Absent | Discarded::Kept) => 0,
            Err(error) => {
                tracing::warn!(tier = self.config.name, %digest, %error, "a chunk was not removed");
                self.stats.count_error(error.kind());
                0
            }
        };
        self.space.change_ends(Fan::of(digest), 0, -signed(removed));
    }

    pub(super) fn take_beat(&mut self, beat: Beat, _now_ns: u64) {
        self.beats += 1;
        self.space.beat();
        let was_leader = self.beat.leader;
        self.beat = beat;
        if beat.leader {
            let due =
                self.beats - self.counted_at_beat >= self.config.beats_in(self.config.count_every);
            if due || !was_leader || self.below_floor() {
                self.counted_at_beat = self.beats;
                self.space.begin_round();
            }
        } else {
            if was_leader {
                self.space.abandon_round();
                self.space.forget_candidates();
            }
            if beat.errno.is_none() && !beat.newer {
                self.space.follow(beat.figures);
            }
        }
        self.raise_wake();
    }

    fn below_floor(&self) -> bool {
        let floor = self.config.min_free_bytes;
        floor > 0 && self.beat.free_bytes.is_some_and(|free| free < floor)
    }

    pub(super) fn make_room(
        &mut self,
        write: &mut QueuedWrite,
        bytes: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Room {
        if self.space.fits(bytes) && !self.below_floor() {
            return Room::Enough;
        }
        if !self.beat.leader || self.below_floor() {
            // The leader makes room: it counts too much, or is told by the file system.
            return Room::None;
        }
        // A little more than is needed, so that not every write waits.
        let slack = self.config.capacity_bytes / 32;
        let target = self.config.capacity_bytes.saturating_sub(bytes);
        if !self.space.will_fit(bytes) {
            self.drop_until(target.saturating_sub(slack), guard, completions);
        }
        if self.space.will_fit(bytes) {
            return if self.space.leaving > 0 { Room::Soon } else { Room::Enough };
        }
        let asked = *write.asked_round.get_or_insert(self.space.rounds_begun);
        if self.space.is_counting() {
            return Room::Soon;
        }
        if self.space.rounds_begun > asked {
            return Room::None;
        }
        self.space.begin_round();
        Room::Soon
    }

    /// Drops the least recently used chunks that the guard lets go, until what remains is at most `target` bytes.
    fn drop_until(
        &mut self,
        target: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) {
        while self.space.remaining_bytes() > target && self.doomed.len() < REMOVALS_MAX {
            let Some(seen) = self.space.next_candidate() else { return };
            let digest = seen.digest;
            let in_use = self.readers.contains_key(&digest)
                || self.writing.contains(&digest)
                || self.doomed.contains_key(&digest);
            // Its file is not as old as it was when it was counted.
            let touched = self.index.get(digest).is_some_and(|entry| {
                entry.touched_ns.is_some() && entry.touched_round >= self.space.candidates_of
            });
            if in_use || touched || !guard.try_evict(digest) {
                continue;
            }
            self.index.remove(digest);
            completions.push(Completion::Evicted { digest });
            self.doom(digest, If::Untouched { mtime_ns: seen.mtime_ns }, seen.bytes);
        }
    }

    /// Counting and collecting, as far as threads are free.
    pub(super) fn collect(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) {
        self.forget_beyond_bound(guard, completions);
        if self.trim && self.beat.leader {
            let capacity = self.config.capacity_bytes;
            let floor = self.config.min_free_bytes;
            let short = floor.saturating_sub(self.beat.free_bytes.unwrap_or(floor));
            let low = capacity - capacity / 8;
            let target =
                if short > 0 { self.space.remaining_bytes().saturating_sub(short) } else { low };
            self.trim = false;
            self.drop_until(target.min(low), guard, completions);
        }
        self.start_removals(now_ns);
        while let Some((_, small)) = self.lanes.as_mut().filter(|(_, small)| small.has_room())
            && let Some(next) = self.space.next_count()
        {
            self.next_key += 1;
            let (job, running) = match next {
                Some(fan) => (Job::Scan(fan), Running::Scan(fan)),
                None => (Job::ListFans, Running::ListFans),
            };
            small.send(self.next_key, job, now_ns);
            self.running.insert(self.next_key, running);
        }
    }

    fn forget_beyond_bound(
        &mut self,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) {
        if self.config.open_as != OpenAs::Node {
            return;
        }
        let mut proposals_left = 64;
        while self.index.len() > self.config.index_chunks_max && proposals_left > 0 {
            proposals_left -= 1;
            let Some(digest) = self.index.oldest() else { return };
            if self.readers.contains_key(&digest) || !guard.try_evict(digest) {
                self.index.meet(digest);
                continue;
            }
            self.index.remove(digest);
            completions.push(Completion::Evicted { digest });
        }
    }

    pub(super) fn counting_failed(&mut self, error: &TierError) {
        tracing::warn!(tier = self.config.name, %error, "the directory could not be counted");
        self.space.not_counted();
    }

    pub(super) fn take_scan(&mut self, fan: Fan, scan: Scan, now_ns: u64) {
        let before = self.space.rounds_ended;
        self.space.counted(fan, &scan.files);
        self.judge_temporaries(fan, scan.temporaries, now_ns);
        if self.space.rounds_ended > before {
            let capacity = self.config.capacity_bytes;
            self.trim = self.space.used_bytes() > capacity - capacity / 16 || self.below_floor();
        }
    }

    /// A temporary that has had the same name for so long is a dead writer's: names are never used twice.
    fn judge_temporaries(&mut self, fan: Fan, names: Vec<OsString>, now_ns: u64) {
        let (now, age) = (self.beats, self.config.beats_in(self.config.stale_after));
        let mut seen: HashMap<(Fan, OsString), u64> = HashMap::new();
        for name in names {
            let place = (fan, name);
            let since = self.temporaries.get(&place).copied().unwrap_or(now);
            let has_room = self.lanes.as_ref().is_some_and(|(_, small)| small.has_room());
            if now - since >= age && has_room {
                let path = fan.path(&self.config.directory).join(&place.1);
                let key = self.next_key();
                self.running.insert(key, Running::RemoveTemporary);
                if let Some((_, small)) = &mut self.lanes {
                    small.send(key, Job::RemoveTemporary(path), now_ns);
                }
            } else if seen.len() + self.temporaries.len() < TEMPORARIES_MAX {
                seen.insert(place, since);
            }
        }
        self.temporaries.retain(|(other, _), _| *other != fan);
        self.temporaries.extend(seen);
    }
}
