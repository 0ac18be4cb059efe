//! Segments and their slots. A slot is addressed by the row of its segment in a table and its number there.

use std::sync::Arc;

use kv_chunk::{Digest, WriteId};

use crate::{
    Held, ListCursor,
    nvme::{files::SegmentFile, segment::Geometry},
};

/// A slot of a segment. A row is used again after its segment is gone, which needs the segment to be idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) row: u32,
    pub(super) slot: u32,
}

impl Place {
    /// Places in order, as numbers for a listing in parts.
    pub(super) fn cursor(self) -> ListCursor {
        ListCursor(u128::from(self.row) << 32 | u128::from(self.slot))
    }

    /// The place that a cursor names; a number that is none is behind all places.
    pub(super) fn at(ListCursor(number): ListCursor) -> Self {
        let row = u32::try_from(number >> 32).unwrap_or(u32::MAX);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let slot = number as u32;
        Self { row, slot }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Writing,
    Live,
    /// No longer readable; reads of it still run.
    Doomed,
    /// Its header is to be overwritten, or is being so.
    Wiping,
    /// Not used again before the next open: a write to it failed, or what it holds is not ours.
    Quarantined,
}

/// Which list of its class a chunk is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    /// New ones, on probation.
    Small,
    Main,
}

/// One slot. What stands in it counts only while it is live. Each has a cache line of its own: in a large index most of
/// what an eviction costs is waiting for memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Slot {
    pub(super) digest: Digest,
    pub(super) write_id: [u8; 16],
    /// Tick of its last use.
    pub(super) used_at: u64,
    /// Tick of its arrival in its queue, which no other chunk of the queue has.
    pub(super) queued_at: u64,
    pub(super) payload_bytes: u32,
    pub(super) readers: u32,
    pub(super) state: State,
    pub(super) queue: Queue,
    /// Uses since it arrived in its queue, up to 3.
    pub(super) hits: u8,
    pub(super) read_errors: u8,
}

impl Slot {
    pub(super) const FREE: Self = Self {
        digest: Digest::from_bytes([0; 16]),
        write_id: [0; 16],
        used_at: 0,
        queued_at: 0,
        payload_bytes: 0,
        readers: 0,
        state: State::Free,
        queue: Queue::Small,
        hits: 0,
        read_errors: 0,
    };

    /// A slot without a chunk.
    pub(super) fn in_state(state: State) -> Self {
        Self { state, ..Self::FREE }
    }

    /// A slot with a readable chunk, in no queue yet.
    pub(super) fn live(digest: Digest, held: Held, used_at: u64) -> Self {
        Self {
            digest,
            write_id: held.write_id.get().to_le_bytes(),
            used_at,
            queued_at: used_at,
            payload_bytes: u32::try_from(held.payload_bytes).unwrap_or(u32::MAX),
            state: State::Live,
            ..Self::FREE
        }
    }

    pub(super) fn held(&self) -> Held {
        Held {
            payload_bytes: u64::from(self.payload_bytes),
            write_id: WriteId::new(u128::from_le_bytes(self.write_id)),
        }
    }

    fn is_busy(&self) -> bool {
        self.readers > 0 || matches!(self.state, State::Writing | State::Doomed | State::Wiping)
    }
}

const _: () = assert!(size_of::<Slot>() == 64);

/// A segment's place in the order of its class by warmth lags behind its warmth by changes of this part of its slots: to
/// move it with each would make an eviction cost more the more segments there are.
const RERANK_PART: usize = 16;

/// A segment file and its slots.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) file: Arc<SegmentFile>,
    /// The file before a change of the way of I/O: requests may still name its place in the ring's table.
    former_file: Option<Arc<SegmentFile>>,
    pub(super) geometry: Geometry,
    pub(super) slots: Vec<Slot>,
    pub(super) free: Vec<u32>,
    pub(super) live: u32,
    pub(super) quarantined: u32,
    /// Slots that are read, written or wiped.
    busy: u32,
    /// Sum of `used_at` of its chunks.
    used_sum: u64,
    /// Counts as used at this tick at least.
    spared_at: u64,
    /// Under which warmth its class has it.
    rank: u64,
    /// Changes since it was ranked.
    unranked: usize,
    /// Slots that the index files tell of, at open.
    pub(super) told: u32,
}

impl Segment {
    pub(super) fn new(file: SegmentFile, geometry: Geometry) -> Self {
        Self {
            file: Arc::new(file),
            former_file: None,
            geometry,
            slots: vec![Slot::FREE; geometry.slots as usize],
            free: Vec::new(),
            live: 0,
            quarantined: 0,
            busy: 0,
            used_sum: 0,
            spared_at: 0,
            rank: 0,
            unranked: 0,
            told: 0,
        }
    }

    /// Whether nothing is read from or written to it.
    pub(super) fn is_idle(&self) -> bool {
        self.busy == 0
    }

    /// The mean tick at which its chunks were last used; 0 if it holds none.
    pub(super) fn warmth(&self) -> u64 {
        let mean = self.used_sum.checked_div(u64::from(self.live));
        mean.map_or(0, |mean| mean.max(self.spared_at).max(1))
    }

    /// Of its chunks one may not be dropped now: it is not to be taken soon.
    pub(super) fn spare(&mut self, tick: u64) {
        self.spared_at = tick;
        self.unranked = self.slots.len();
    }

    /// Whether it holds nothing that anybody may want: neither chunks nor slots that are not to be touched.
    pub(super) fn is_empty(&self) -> bool {
        self.live == 0 && self.quarantined == 0
    }

    /// Under which warmth its class has it.
    pub(super) fn rank(&self) -> u64 {
        self.rank
    }

    /// After a change: its rank before and from now on, if it is to be ranked anew.
    pub(super) fn rerank(&mut self) -> Option<(u64, u64)> {
        let warmth = self.warmth();
        self.unranked += 1;
        // What is empty is known to be so at once.
        let is_due =
            (warmth == 0) != (self.rank == 0) || self.unranked > self.slots.len() / RERANK_PART;
        if !is_due || warmth == self.rank {
            return None;
        }
        self.unranked = 0;
        Some((std::mem::replace(&mut self.rank, warmth), warmth))
    }

    /// Uses another opening of the same file from now on.
    pub(super) fn replace_file(&mut self, file: Arc<SegmentFile>) {
        self.former_file = Some(std::mem::replace(&mut self.file, file));
    }

    /// All openings of its file.
    pub(super) fn files(&self) -> impl Iterator<Item = &Arc<SegmentFile>> {
        [&self.file].into_iter().chain(&self.former_file)
    }

    /// Its readable chunks, last used first.
    pub(super) fn digests(&self) -> Vec<Digest> {
        let live = self.slots.iter().filter(|slot| slot.state == State::Live);
        let mut live: Vec<(u64, Digest)> = live.map(|slot| (slot.used_at, slot.digest)).collect();
        live.sort_unstable_by(|one, other| other.cmp(one));
        live.into_iter().map(|(_, digest)| digest).collect()
    }

    /// Its readable chunks.
    pub(super) fn live_digests(&self) -> impl Iterator<Item = Digest> {
        let live = self.slots.iter().filter(|slot| slot.state == State::Live);
        live.map(|slot| slot.digest)
    }

    /// Counts its slots anew, after the index was filled.
    pub(super) fn recount(&mut self) {
        let count = |wanted: fn(&Slot) -> bool| {
            let count = self.slots.iter().filter(|slot| wanted(slot)).count();
            u32::try_from(count).unwrap_or(u32::MAX)
        };
        self.live = count(|slot| slot.state == State::Live);
        self.quarantined = count(|slot| slot.state == State::Quarantined);
        self.busy = count(Slot::is_busy);
        let live = self.slots.iter().filter(|slot| slot.state == State::Live);
        self.used_sum = live.map(|slot| slot.used_at).sum();
        let free = (0..).zip(&self.slots).filter(|(_, slot)| slot.state == State::Free);
        self.free = free.map(|(number, _)| number).collect();
        self.free.reverse();
        (self.rank, self.unranked) = (self.warmth(), 0);
    }
}

/// All segments.
#[derive(Debug, Default)]
pub(super) struct Slab {
    rows: Vec<Option<Segment>>,
    len: usize,
}

impl Slab {
    /// Adds a segment; its row.
    pub(super) fn add(&mut self, segment: Segment) -> u32 {
        self.len += 1;
        let row = self.rows.iter().position(Option::is_none).unwrap_or(self.rows.len());
        if row == self.rows.len() {
            self.rows.push(None);
        }
        self.rows[row] = Some(segment);
        u32::try_from(row).expect("segments are open files: there are few")
    }

    pub(super) fn remove(&mut self, row: u32) -> Option<Segment> {
        let segment = self.rows.get_mut(row as usize)?.take()?;
        self.len -= 1;
        Some(segment)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, row: u32) -> Option<&Segment> {
        self.rows.get(row as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, row: u32) -> Option<&mut Segment> {
        self.rows.get_mut(row as usize)?.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.rows.iter().flatten()
    }

    /// Live slots from a place on.
    pub(super) fn live_from(&self, from: Place) -> impl Iterator<Item = (Place, &Slot)> {
        let rows = (0..).zip(&self.rows).skip(from.row as usize);
        rows.flat_map(move |(row, segment)| {
            let first = if row == from.row { from.slot } else { 0 };
            let slots = segment.iter().flat_map(|segment| (0..).zip(&segment.slots));
            slots
                .skip(first as usize)
                .filter(|(_, slot)| slot.state == State::Live)
                .map(move |(slot, it)| (Place { row, slot }, it))
        })
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.rows.iter_mut().flatten()
    }

    pub(super) fn slot(&self, place: Place) -> Option<&Slot> {
        self.get(place.row)?.slots.get(place.slot as usize)
    }

    /// For links, hits and what else no count depends on.
    pub(super) fn slot_mut(&mut self, place: Place) -> Option<&mut Slot> {
        self.get_mut(place.row)?.slots.get_mut(place.slot as usize)
    }

    /// Changes a slot, and what is counted of it.
    pub(super) fn change(&mut self, place: Place, change: impl FnOnce(&mut Slot)) {
        let Some(segment) = self.get_mut(place.row) else { return };
        let Some(slot) = segment.slots.get_mut(place.slot as usize) else { return };
        let before = *slot;
        change(slot);
        let after = *slot;
        let is = |slot: &Slot, state| u32::from(slot.state == state);
        segment.busy += u32::from(after.is_busy());
        segment.busy -= u32::from(before.is_busy());
        segment.live += is(&after, State::Live);
        segment.live -= is(&before, State::Live);
        segment.quarantined += is(&after, State::Quarantined);
        segment.quarantined -= is(&before, State::Quarantined);
        let used = |slot: &Slot| if slot.state == State::Live { slot.used_at } else { 0 };
        segment.used_sum = segment.used_sum + used(&after) - used(&before);
    }
}
