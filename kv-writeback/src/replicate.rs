//! Which replicas of a chunk are still to write, and which are given up under back-pressure: second ones first.

use kv_chunk::Digest;

use crate::{Refused, queue::Pending};

/// The set of tiers in `mask`, ascending.
pub(crate) fn tiers_in(mask: u8) -> impl Iterator<Item = u8> {
    (0..8).filter(move |tier| mask & bit(*tier) != 0)
}

/// The mask of one tier; empty for a number that no mask of eight holds.
pub(crate) fn bit(tier: u8) -> u8 {
    1_u8.checked_shl(u32::from(tier)).unwrap_or(0)
}

/// The mask of the first `tiers` tiers.
pub(crate) fn first(tiers: u8) -> u8 {
    (0..tiers.min(8)).fold(0, |mask, tier| mask | bit(tier))
}

/// Where one chunk stands: each tier is in at most one of the masks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Replicas {
    /// To be written, not handed out.
    pub(crate) queued: u8,
    /// Handed out and not finished.
    pub(crate) writing: u8,
    /// Readable in that tier.
    pub(crate) done: u8,
}

impl Replicas {
    /// Tiers that will still say something about this chunk.
    pub(crate) fn outstanding(self) -> u8 {
        self.queued | self.writing
    }

    /// Whether a tier other than `tier` holds the chunk.
    pub(crate) fn held_elsewhere(self, tier: u8) -> bool {
        self.done & !bit(tier) != 0
    }

    /// Whether a tier other than `tier` holds the chunk or is going to.
    pub(crate) fn has_home_besides(self, tier: u8) -> bool {
        (self.done | self.outstanding()) & !bit(tier) != 0
    }

    /// Whether giving up what is queued frees the chunk at once, and leaves a copy.
    pub(crate) fn can_be_released(self) -> bool {
        self.done != 0 && self.writing == 0
    }
}

/// A queued replica that can be given up.
#[derive(Clone, Copy, Debug)]
struct Victim {
    tier: u8,
    digest: Digest,
}

impl<R: Clone> Pending<R> {
    /// Makes room for one more chunk and says for which of `wanted` tiers it may queue.
    ///
    /// Nothing is given up for a chunk that is refused then. A replica is given up only if its chunk has another
    /// home; one whose chunk another tier already holds goes before the newcomer's own second replica, and that before
    /// one whose chunk another tier is still to write.
    pub(crate) fn make_room(&mut self, wanted: u8) -> Result<u8, Refused> {
        if wanted == 0 {
            return Err(Refused::NoTier);
        }
        if self.is_staging_full() && self.releasable().is_none() {
            return Err(Refused::StagingFull);
        }
        let (queued, victims) = self.place(wanted).ok_or(Refused::QueueFull)?;
        for victim in victims {
            self.give_up(victim);
        }
        if self.is_staging_full() {
            // A victim above may have been the releasable chunk: then this one has left, or is still releasable.
            let digest = self.releasable().expect("one was found before, and victims only add");
            self.release(digest);
        }
        Ok(queued)
    }

    /// Frees one slot by giving up the waiting replicas of a chunk that some tier holds. False: there is none.
    pub(crate) fn free_a_slot(&mut self) -> bool {
        let Some(digest) = self.releasable() else { return false };
        self.release(digest);
        true
    }

    fn is_staging_full(&self) -> bool {
        self.chunks.len() >= self.staged_chunks_max
    }

    fn place(&self, wanted: u8) -> Option<(u8, Vec<Victim>)> {
        let full = |tier: &u8| self.lanes[usize::from(*tier)].places >= self.queue_chunks_max;
        let mut queued = wanted;
        let mut victims = Vec::new();
        for tier in tiers_in(wanted).filter(full) {
            match self.victim(tier, Replicas::held_elsewhere) {
                Some(victim) => victims.push(victim),
                None => queued &= !bit(tier),
            }
        }
        if queued == 0 {
            let victim =
                tiers_in(wanted).find_map(|it| self.victim(it, Replicas::has_home_besides))?;
            queued = bit(victim.tier);
            victims.push(victim);
        }
        Some((queued, victims))
    }

    /// The oldest replica queued for `tier` that `may_go`.
    fn victim(&self, tier: u8, may_go: impl Fn(Replicas, u8) -> bool) -> Option<Victim> {
        let queue = &self.lanes[usize::from(tier)].queue;
        let may_go = |digest: &&Digest| may_go(self.chunks[digest].replicas, tier);
        queue.iter().find(may_go).map(|digest| Victim { tier, digest: *digest })
    }

    /// The oldest chunk in the longest queue that leaves staging, and leaves a copy, if its waiting replicas go.
    fn releasable(&self) -> Option<Digest> {
        let mut lanes: Vec<_> = self.lanes.iter().collect();
        lanes.sort_by_key(|lane| std::cmp::Reverse(lane.queue.len()));
        let can_go = |digest: &&Digest| self.chunks[digest].replicas.can_be_released();
        lanes.into_iter().find_map(|lane| lane.queue.iter().find(can_go)).copied()
    }

    fn release(&mut self, digest: Digest) {
        for tier in tiers_in(self.chunks[&digest].replicas.queued) {
            self.give_up(Victim { tier, digest });
        }
    }

    fn give_up(&mut self, victim: Victim) {
        let Victim { tier, digest } = victim;
        let Some(chunk) = self.chunks.get_mut(&digest) else { return };
        chunk.replicas.queued &= !bit(tier);
        let lane = &mut self.lanes[usize::from(tier)];
        lane.queue.retain(|queued| *queued != digest);
        lane.places -= 1;
        self.stats.replicas_given_up += 1;
        self.release_if_finished(digest);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn masks_and_numbers_agree_at_the_ends() {
        assert_eq!(tiers_in(0b1000_0001).collect::<Vec<_>>(), [0, 7]);
        assert_eq!((bit(0), bit(7), bit(8), bit(255)), (1, 128, 0, 0));
        assert_eq!((first(0), first(3), first(8), first(200)), (0, 7, 255, 255));
    }

    #[test]
    fn only_another_tiers_copy_makes_a_replica_second() {
        let replicas = Replicas { queued: 0b10, writing: 0b01, done: 0 };
        assert!(!replicas.held_elsewhere(1) && replicas.has_home_besides(1));
        let alone = Replicas { queued: 0b10, writing: 0, done: 0 };
        assert!(!alone.has_home_besides(1));
        assert!(Replicas { queued: 0b10, writing: 0, done: 0b01 }.can_be_released());
        assert!(!Replicas { queued: 0b10, writing: 0b100, done: 0b01 }.can_be_released());
    }
}
