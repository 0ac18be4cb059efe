//! Chooses what to drop when the cap is reached. Everything is proposed to the guard first; every scan has a bound.

use kv_chunk::Digest;

use crate::{
    EvictionGuard,
    nvme::index::{Doomed, Index, Place, Segment},
};

/// Chunks proposed for one that is wanted.
const CANDIDATES_MAX: usize = 64;
/// Segments proposed for one that is wanted.
const SEGMENTS_TRIED_MAX: usize = 4;

/// Chunks that were dropped.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    pub(super) digests: Vec<Digest>,
    /// Slots to wipe.
    pub(super) wipes: Vec<Place>,
}

/// Drops the least recently used chunk of a class that nobody reads and the guard gives up.
///
/// A chunk that is in use goes to the end of the order: it was asked for again.
pub(super) fn drop_coldest_chunk(
    index: &mut Index,
    record_bytes: u64,
    guard: &dyn EvictionGuard,
    dropped: &mut Dropped,
) -> bool {
    let candidates = index.class(record_bytes).map_or(0, |class| class.order.len());
    for _ in 0..candidates.min(CANDIDATES_MAX) {
        let oldest = index.class(record_bytes).and_then(|class| class.order.front());
        let Some(&digest) = oldest else { return false };
        if index.is_read(digest) || !guard.try_evict(digest) {
            index.touch(digest);
            continue;
        }
        drop_chunk(index, digest, dropped);
        return true;
    }
    false
}

fn drop_chunk(index: &mut Index, digest: Digest, dropped: &mut Dropped) {
    if let Some(Doomed::Wipe(place)) = index.doom(digest) {
        dropped.wipes.push(place);
    }
    dropped.digests.push(digest);
}

/// Takes the coldest idle segment for a class, if it is not of that class or holds nothing, and (if given) was last used
/// before `colder_than`. Chunks that the guard gave up before it refused another of the same segment are dropped too.
pub(super) fn take_coldest_segment(
    index: &mut Index,
    for_record_bytes: u64,
    colder_than: Option<u64>,
    guard: &dyn EvictionGuard,
    dropped: &mut Dropped,
) -> Option<Segment> {
    let eligible = |segment: &&Segment| {
        let other = segment.geometry.record_bytes != for_record_bytes || segment.live == 0;
        other && colder_than.is_none_or(|tick| segment.live == 0 || segment.last_used < tick)
    };
    let rank =
        |segment: &Segment| (segment.live > 0, segment.last_used, segment.geometry.segment_id);
    let mut candidates: Vec<_> = index.segments().filter(eligible).map(rank).collect();
    candidates.sort_unstable();
    let idle = |id: &u64| index.segment(*id).is_some_and(Segment::is_idle);
    let ids = candidates.into_iter().map(|(_, _, id)| id).filter(idle);
    let ids: Vec<u64> = ids.take(SEGMENTS_TRIED_MAX).collect();
    ids.into_iter().find_map(|id| {
        let digests = index.segment(id)?.digests();
        let mut given_up = digests.iter().copied().take_while(|&digest| guard.try_evict(digest));
        let given_up: Vec<Digest> = given_up.by_ref().collect();
        if given_up.len() < digests.len() {
            given_up.into_iter().for_each(|digest| drop_chunk(index, digest, dropped));
            index.touch_segment(id);
            return None;
        }
        dropped.digests.extend(given_up);
        index.remove_segment(id)
    })
}

/// Tick of the last use of the chunk that a class would drop next.
pub(super) fn coldest_tick(index: &Index, record_bytes: u64) -> Option<u64> {
    let oldest = index.class(record_bytes)?.order.front()?;
    Some(index.get(*oldest)?.used_at)
}
