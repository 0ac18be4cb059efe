//! Chooses what to drop when the cap is reached. Everything is proposed to the guard first; every search has a
//! bound, but for the last resort of a size that has no segment: that ends after one look at each.

use kv_chunk::Digest;

use crate::{
    EvictionGuard,
    nvme::index::{Doomed, Index, Place, Segment},
};

/// Chunks proposed for one that is wanted.
const CANDIDATES_MAX: usize = 64;
/// Segments asked about for one that would be better than a chunk of the own size.
const SEGMENTS_TRIED_MAX: usize = 4;
/// Segments of one class looked at for that: busy ones are passed over.
const SEGMENTS_SEEN_MAX: usize = 32;

/// Chunks that were dropped.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    pub(super) digests: Vec<Digest>,
    /// Slots to wipe.
    pub(super) wipes: Vec<Place>,
}

/// Drops the next chunk of a class that nobody reads and the guard gives up.
///
/// A chunk that is in use goes to the end of the queue: it was asked for again.
pub(super) fn drop_coldest_chunk(
    index: &mut Index,
    record_bytes: u64,
    guard: &dyn EvictionGuard,
    dropped: &mut Dropped,
) -> bool {
    let chunks = index.class(record_bytes).map_or(0, |class| class.queues.len());
    for _ in 0..chunks.min(CANDIDATES_MAX) {
        let Some((place, slot)) = index.candidate(record_bytes) else { return false };
        if slot.readers > 0 || !guard.try_evict(slot.digest) {
            index.spare(place);
            continue;
        }
        drop_chunk(index, slot.digest, dropped);
        return true;
    }
    false
}

fn drop_chunk(index: &mut Index, digest: Digest, dropped: &mut Dropped) {
    if let Some(Doomed::Wipe(place)) = index.evict(digest) {
        dropped.wipes.push(place);
    }
    dropped.digests.push(digest);
}

/// Takes the coldest idle segment for a class that holds no leased chunk, if it is not of that class or holds nothing, and
/// (if given) its chunks were last used before `colder_than`, in the mean.
///
/// Segments with a leased chunk count as used now. Without `colder_than` none that may be taken is overlooked.
pub(super) fn take_coldest_segment(
    index: &mut Index,
    for_record_bytes: u64,
    colder_than: Option<u64>,
    guard: &dyn EvictionGuard,
    dropped: &mut Dropped,
) -> Option<Segment> {
    let begun = index.tick();
    let mut limit = SEGMENTS_TRIED_MAX;
    loop {
        let rows = coldest(index, for_record_bytes, colder_than, begun);
        if rows.is_empty() {
            return None;
        }
        for row in rows {
            if let Some(segment) = take_segment(index, row, guard, dropped) {
                return Some(segment);
            }
            index.spare_segment(row);
            limit = limit.saturating_sub(1);
            if limit == 0 && colder_than.is_some() {
                return None;
            }
        }
    }
}

/// Takes this segment if none of its chunks is leased. Those that the guard gave up before it refused another, which was
/// leased meanwhile, are dropped.
fn take_segment(
    index: &mut Index,
    row: u32,
    guard: &dyn EvictionGuard,
    dropped: &mut Dropped,
) -> Option<Segment> {
    let segment = index.segment(row)?;
    if !segment.live_digests().all(|digest| guard.may_evict(digest)) {
        return None;
    }
    // Those of a guard that cannot be asked first: leased ones were used lately, so that a refusal comes soon.
    let digests = segment.digests();
    let given_up = digests.iter().copied().take_while(|&digest| guard.try_evict(digest));
    let given_up: Vec<Digest> = given_up.collect();
    if given_up.len() < digests.len() {
        given_up.iter().for_each(|&digest| drop_chunk(index, digest, dropped));
        return None;
    }
    dropped.digests.extend(given_up);
    index.remove_segment(row)
}

/// Rows of the segments to try next, coldest first; none ranked after `begun`.
fn coldest(index: &Index, for_record_bytes: u64, colder_than: Option<u64>, begun: u64) -> Vec<u32> {
    let mut found = Vec::new();
    for (record_bytes, class) in index.classes() {
        let wanted = |&&(warmth, row): &&(u64, u32)| {
            let is_idle = index.segment(row).is_some_and(Segment::is_idle);
            let other = warmth == 0 || record_bytes != for_record_bytes;
            is_idle && other && colder_than.is_none_or(|tick| warmth < tick)
        };
        let ranked = class.cold.iter().take_while(|(warmth, _)| *warmth <= begun);
        let seen = if colder_than.is_some() { SEGMENTS_SEEN_MAX } else { usize::MAX };
        found.extend(ranked.take(seen).filter(wanted).take(SEGMENTS_TRIED_MAX));
    }
    found.sort_unstable();
    found.into_iter().map(|(_, row)| row).take(SEGMENTS_TRIED_MAX).collect()
}

/// Tick of the last use of the chunk that a class would drop next.
pub(super) fn coldest_tick(index: &mut Index, record_bytes: u64) -> Option<u64> {
    let (_, slot) = index.candidate(record_bytes)?;
    Some(slot.used_at)
}
