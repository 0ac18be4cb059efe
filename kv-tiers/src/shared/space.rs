//! How much the directory holds, and what would go first.
//!
//! The leader counts one fan-out directory at a time. What this node publishes or removes is added and taken away at
//! once; a directory in which it did so while that directory was counted is counted again. Writes of other nodes are
//! seen at the next counting, so with many writers the sum can be behind.

use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};

use kv_chunk::Digest;

use super::{jobs::Seen, lease::Figures, paths::Fan};

/// Victims remembered from one counting: the oldest.
const CANDIDATES_MAX: usize = 1 << 16;
/// A directory that changes during each counting keeps its old figure after so many.
const TRIES_MAX: u8 = 8;
/// So many beats are waited for changes that do not end.
const STUCK_BEATS_MAX: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: i64,
    chunks: i64,
}

/// Changes of this node in one directory, to tell whether a counting can be believed.
#[derive(Clone, Copy, Debug, Default)]
struct Changes {
    seen: u64,
    running: u32,
}

/// One counting in progress.
#[derive(Debug)]
struct Round {
    left: Vec<(Fan, u8)>,
    counting: Option<(Fan, u8, u64)>,
    listing: bool,
    listed: bool,
    /// The youngest on top, to be dropped first.
    oldest: BinaryHeap<Seen>,
    /// Removed by us meanwhile: no victims, even if they were seen.
    removed: HashSet<Digest>,
    stuck_beats: u8,
}

#[derive(Debug)]
pub(super) struct Space {
    capacity_bytes: u64,
    fans: HashMap<Fan, Sum>,
    changes: HashMap<Fan, Changes>,
    /// All of `fans` was counted by us: the sum is theirs.
    counted: bool,
    total: Sum,
    /// Of writes in progress.
    reserved: i64,
    /// Of removals in progress: not free yet.
    pub(super) leaving: u64,
    round: Option<Round>,
    pub(super) rounds_begun: u64,
    pub(super) rounds_ended: u64,
    /// Least recently touched first.
    candidates: BTreeSet<Seen>,
    /// The counting that they are from.
    pub(super) candidates_of: u64,
    /// What this node added since the last counting of the leader, and during the one before.
    followed: (u64, Sum, Sum),
}

impl Space {
    pub(super) fn new(capacity_bytes: u64, figures: Figures) -> Self {
        let mut space = Self {
            capacity_bytes,
            fans: HashMap::new(),
            changes: HashMap::new(),
            counted: false,
            total: Sum::default(),
            reserved: 0,
            leaving: 0,
            round: None,
            rounds_begun: 0,
            rounds_ended: 0,
            candidates: BTreeSet::new(),
            candidates_of: 0,
            followed: (figures.round, Sum::default(), Sum::default()),
        };
        space.total = sum_of(figures);
        space
    }

    pub(super) fn used_bytes(&self) -> u64 {
        u64::try_from(self.total.bytes.saturating_add(self.reserved)).unwrap_or(0)
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            round: self.followed.0,
            used_bytes: u64::try_from(self.total.bytes).unwrap_or(0),
            chunks: u64::try_from(self.total.chunks).unwrap_or(0),
        }
    }

    /// Takes over what the leader counted, and adds what it cannot know yet.
    pub(super) fn follow(&mut self, figures: Figures) {
        self.counted = false;
        let (round, current, _) = self.followed;
        if figures.round != round {
            self.followed = (figures.round, Sum::default(), current);
        }
        let (_, current, before) = self.followed;
        let counted = sum_of(figures);
        self.total = Sum {
            bytes: counted.bytes.saturating_add(current.bytes).saturating_add(before.bytes),
            chunks: counted.chunks.saturating_add(current.chunks).saturating_add(before.chunks),
        };
    }

    pub(super) fn fits(&self, bytes: u64) -> bool {
        self.used_bytes().saturating_add(bytes) <= self.capacity_bytes
    }

    /// Whether it will fit when the removals in progress have ended.
    pub(super) fn will_fit(&self, bytes: u64) -> bool {
        self.remaining_bytes().saturating_add(bytes) <= self.capacity_bytes
    }

    pub(super) fn remaining_bytes(&self) -> u64 {
        self.used_bytes().saturating_sub(self.leaving)
    }

    pub(super) fn change_begins(&mut self, fan: Fan, reserve: u64) {
        let changes = self.changes.entry(fan).or_default();
        changes.running += 1;
        changes.seen += 1;
        self.reserved = self.reserved.saturating_add(signed(reserve));
        // In the first counting a directory that is younger than the list is counted as well.
        if let Some(round) = self.round.as_mut().filter(|round| round.listed && !self.counted)
            && !self.fans.contains_key(&fan)
            && !round.left.iter().any(|(left, _)| *left == fan)
        {
            round.left.push((fan, 0));
        }
    }

    /// The end of a change that has added so many bytes, or taken them away.
    pub(super) fn change_ends(&mut self, fan: Fan, reserved: u64, bytes: i64) {
        if let Some(changes) = self.changes.get_mut(&fan) {
            changes.running = changes.running.saturating_sub(1);
            changes.seen += 1;
        }
        self.reserved = self.reserved.saturating_sub(signed(reserved));
        self.add(fan, Sum { bytes, chunks: bytes.signum() });
    }

    fn add(&mut self, fan: Fan, sum: Sum) {
        let add = |to: &mut Sum| {
            to.bytes = to.bytes.saturating_add(sum.bytes);
            to.chunks = to.chunks.saturating_add(sum.chunks);
        };
        add(&mut self.total);
        add(&mut self.followed.1);
        match self.fans.get_mut(&fan) {
            Some(known) => add(known),
            // A new directory is one that we know all of.
            None if self.counted => drop(self.fans.insert(fan, sum)),
            None => {}
        }
    }

    pub(super) fn is_counting(&self) -> bool {
        self.round.is_some()
    }

    pub(super) fn begin_round(&mut self) {
        if self.round.is_none() {
            self.rounds_begun += 1;
            self.round = Some(Round {
                left: Vec::new(),
                counting: None,
                listing: false,
                listed: false,
                oldest: BinaryHeap::new(),
                removed: HashSet::new(),
                stuck_beats: 0,
            });
        }
    }

    pub(super) fn abandon_round(&mut self) {
        if self.round.take().is_some() {
            self.rounds_ended += 1;
        }
    }

    /// What to count next; `Some(None)` asks for the list of directories. `None`: one is being counted.
    pub(super) fn next_count(&mut self) -> Option<Option<Fan>> {
        let round = self.round.as_mut()?;
        if round.counting.is_some() {
            return None;
        }
        if !round.listed {
            let begins = !std::mem::replace(&mut round.listing, true);
            return begins.then_some(None);
        }
        // One that is changing now cannot be believed: it comes when its change has ended.
        let is_quiet = |fan: &Fan| self.changes.get(fan).is_none_or(|changes| changes.running == 0);
        let place = round.left.iter().rposition(|(fan, _)| is_quiet(fan))?;
        let (fan, tries) = round.left.swap_remove(place);
        let seen = self.changes.get(&fan).map_or(0, |changes| changes.seen);
        round.counting = Some((fan, tries, seen));
        Some(Some(fan))
    }

    pub(super) fn listed(&mut self, fans: Vec<Fan>) {
        let Some(round) = &mut self.round else { return };
        round.listed = true;
        // One that is not listed can be younger than the list, or gone: counting tells.
        let mut all: BTreeSet<Fan> = fans.into_iter().collect();
        all.extend(self.fans.keys().chain(self.changes.keys()));
        round.left = all.into_iter().map(|fan| (fan, 0)).collect();
        self.end_if_done();
    }

    /// A directory was counted.
    pub(super) fn counted(&mut self, fan: Fan, files: &[Seen]) {
        let Some(round) = &mut self.round else { return };
        let Some((_, tries, seen)) = round.counting.take() else { return };
        let changes = self.changes.get(&fan).copied().unwrap_or_default();
        if changes.running > 0 || changes.seen != seen {
            if tries < TRIES_MAX {
                round.left.insert(0, (fan, tries + 1));
                return;
            }
            // What we followed change by change is better than a figure from the middle of a change.
        } else {
            self.changes.remove(&fan);
            self.set(fan, sum_files(files));
        }
        let Some(round) = &mut self.round else { return };
        for file in files {
            round.oldest.push(*file);
            if round.oldest.len() > CANDIDATES_MAX {
                round.oldest.pop();
            }
        }
        self.end_if_done();
    }

    /// A directory whose change does not end is left out of the counting, after a while.
    pub(super) fn beat(&mut self) {
        let Some(round) = &mut self.round else { return };
        let is_stuck = round.listed
            && round.counting.is_none()
            && round
                .left
                .iter()
                .all(|(fan, _)| self.changes.get(fan).is_some_and(|changes| changes.running > 0));
        round.stuck_beats = if is_stuck { round.stuck_beats + 1 } else { 0 };
        if round.stuck_beats >= STUCK_BEATS_MAX {
            round.left.clear();
            self.end_if_done();
        }
    }

    /// It could not be counted: its old figure stays.
    pub(super) fn not_counted(&mut self) {
        if let Some(round) = &mut self.round {
            round.counting = None;
            round.listed = true;
        }
        self.end_if_done();
    }

    fn set(&mut self, fan: Fan, sum: Sum) {
        let old = self.fans.insert(fan, sum).unwrap_or_default();
        if self.counted {
            self.total.bytes = self.total.bytes.saturating_add(sum.bytes).saturating_sub(old.bytes);
            self.total.chunks =
                self.total.chunks.saturating_add(sum.chunks).saturating_sub(old.chunks);
        }
    }

    fn end_if_done(&mut self) {
        let done =
            |round: &mut Round| round.listed && round.left.is_empty() && round.counting.is_none();
        let Some(round) = self.round.take_if(done) else { return };
        let removed = round.removed;
        let is_there = |seen: &Seen| !removed.contains(&seen.digest);
        self.candidates = round.oldest.into_iter().filter(is_there).collect();
        self.candidates_of = self.rounds_begun;
        self.rounds_ended += 1;
        self.followed = (self.followed.0.wrapping_add(1), Sum::default(), self.followed.1);
        if !self.counted {
            self.counted = true;
            self.total = self.fans.values().fold(Sum::default(), |all, sum| Sum {
                bytes: all.bytes.saturating_add(sum.bytes),
                chunks: all.chunks.saturating_add(sum.chunks),
            });
        }
    }

    /// This node has removed the chunk.
    pub(super) fn removed(&mut self, digest: Digest) {
        if let Some(round) = &mut self.round {
            round.removed.insert(digest);
        }
    }

    /// The least recently touched chunk of the last counting; each is given once.
    pub(super) fn next_candidate(&mut self) -> Option<Seen> {
        self.candidates.pop_first()
    }

    pub(super) fn forget_candidates(&mut self) {
        self.candidates.clear();
    }
}

fn sum_of(figures: Figures) -> Sum {
    Sum { bytes: signed(figures.used_bytes), chunks: signed(figures.chunks) }
}

fn sum_files(files: &[Seen]) -> Sum {
    Sum {
        bytes: signed(files.iter().map(|file| file.bytes).sum()),
        chunks: signed(files.len() as u64),
    }
}

pub(super) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
