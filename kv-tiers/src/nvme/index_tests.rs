//! Random operations on the index against what must always hold.

use std::collections::{BTreeSet, HashMap, HashSet};

use kv_chunk::{Digest, WriteId};
use proptest::prelude::*;

use crate::{
    Held, Purpose, Unguarded,
    nvme::{
        evict::{Dropped, drop_coldest_chunk, take_coldest_segment},
        files::SegmentFile,
        index::{Doomed, Index, Place, Segment},
        segment::Geometry,
    },
};

const CLASSES: [u64; 2] = [8192, 12_288];
const SLOTS: u32 = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u8, bool),
    EndWrite(bool),
    Read(u8),
    EndRead,
    LoseRead,
    Remove(u8),
    EndWipe(bool),
    Evict(bool),
    TakeSegment(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0..16u8, any::<bool>()).prop_map(|(chunk, class)| Step::Write(chunk, class)),
        5 => proptest::bool::weighted(0.9).prop_map(Step::EndWrite),
        4 => (0..16u8).prop_map(Step::Read),
        4 => Just(Step::EndRead),
        1 => Just(Step::LoseRead),
        2 => (0..16u8).prop_map(Step::Remove),
        4 => proptest::bool::weighted(0.9).prop_map(Step::EndWipe),
        2 => any::<bool>().prop_map(Step::Evict),
        1 => any::<bool>().prop_map(Step::TakeSegment),
    ];
    proptest::collection::vec(step, 0..300)
}

fn digest(chunk: u8) -> Digest {
    Digest::from_bytes([chunk; 16])
}

fn class(second: bool) -> u64 {
    CLASSES[usize::from(second)]
}

/// What the driver would have in flight.
#[derive(Debug, Default)]
struct World {
    index: Index,
    writes: Vec<(Place, u8)>,
    reads: Vec<(Place, u8)>,
    wipes: Vec<Place>,
    held: HashMap<u8, Place>,
    quarantined: HashSet<Place>,
    /// Number of the segment in each row.
    rows: HashMap<u32, u64>,
}

impl World {
    fn add_segment(&mut self, record_bytes: u64) {
        let segment_id = self.index.next_segment_id();
        let geometry = Geometry { segment_id, store_uuid: [0; 16], record_bytes, slots: SLOTS };
        let file = SegmentFile::for_tests(std::path::Path::new("/dev/null"));
        let row = self.index.add_segment(file, geometry);
        self.rows.insert(row, segment_id);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write(chunk, second) => {
                let known = self.held.contains_key(&chunk)
                    || self.writes.iter().any(|(_, other)| *other == chunk);
                if !known && let Some(place) = self.index.take_free(class(second)) {
                    self.assert_unused(place);
                    self.writes.push((place, chunk));
                }
            }
            Step::EndWrite(good) => {
                let Some((place, chunk)) = self.writes.pop() else { return };
                if good {
                    let held = Held { payload_bytes: 1, write_id: WriteId::new(0) };
                    self.index.publish(place, digest(chunk), held);
                    self.held.insert(chunk, place);
                } else {
                    self.index.end_failed_write(place, false);
                    self.quarantined.insert(place);
                }
            }
            Step::Read(chunk) => {
                let entry = self.index.begin_read(digest(chunk), Purpose::Use);
                assert_eq!(entry.map(|entry| entry.place), self.held.get(&chunk).copied());
                self.reads.extend(entry.map(|entry| (entry.place, chunk)));
            }
            Step::EndRead => self.end_read(),
            Step::LoseRead => self.lose_read(),
            Step::Remove(chunk) => {
                let doomed = self.index.doom(digest(chunk));
                assert_eq!(doomed.is_some(), self.held.remove(&chunk).is_some());
                if let Some(Doomed::Wipe(place)) = doomed {
                    self.wipes.push(place);
                }
            }
            Step::EndWipe(good) => {
                let Some(place) = self.wipes.pop() else { return };
                self.index.end_wipe(place, good);
                if !good {
                    self.quarantined.insert(place);
                }
            }
            Step::Evict(second) => {
                let mut dropped = Dropped::default();
                drop_coldest_chunk(&mut self.index, class(second), &Unguarded, &mut dropped);
                self.wipes.extend(&dropped.wipes);
                self.forget(&dropped.digests);
            }
            Step::TakeSegment(second) => self.take_segment(class(second)),
        }
    }

    fn lose_read(&mut self) {
        let Some((place, chunk)) = self.reads.last().copied() else { return };
        let was_held = self.held.get(&chunk) == Some(&place);
        assert_eq!(self.index.lose(place), was_held.then_some(digest(chunk)));
        if was_held {
            self.held.remove(&chunk);
        }
        self.quarantined.insert(place);
        self.end_read();
    }

    fn take_segment(&mut self, record_bytes: u64) {
        let mut dropped = Dropped::default();
        let index = &mut self.index;
        let taken = take_coldest_segment(index, record_bytes, None, &Unguarded, &mut dropped);
        let Some(segment) = taken else { return };
        self.forget(&dropped.digests);
        let row =
            (0..9).find(|row| self.rows.get(row) == Some(&segment.geometry.segment_id)).unwrap();
        let of_it = |place: &Place| place.row == row;
        assert!(!self.reads.iter().any(|(place, _)| of_it(place)));
        assert!(!self.writes.iter().any(|(place, _)| of_it(place)));
        assert!(!self.wipes.iter().any(of_it));
        self.quarantined.retain(|place| !of_it(place));
        self.add_segment(record_bytes);
    }

    fn end_read(&mut self) {
        let Some((place, _)) = self.reads.pop() else { return };
        if let Some(place) = self.index.end_read(place) {
            assert!(!self.reads.iter().any(|(other, _)| *other == place), "{place:?} is read");
            self.wipes.push(place);
        }
    }

    fn forget(&mut self, digests: &[Digest]) {
        for dropped in digests {
            let place = self.held.remove(&dropped.to_bytes()[0]).unwrap();
            assert!(!self.reads.iter().any(|(other, _)| *other == place), "{place:?} is read");
        }
    }

    fn assert_unused(&self, place: Place) {
        assert!(!self.reads.iter().any(|(other, _)| *other == place), "{place:?} is read");
        assert!(!self.writes.iter().any(|(other, _)| *other == place), "{place:?} is written");
        assert!(!self.wipes.contains(&place), "{place:?} is wiped");
        assert!(!self.held.values().any(|other| *other == place), "{place:?} holds a chunk");
        assert!(!self.quarantined.contains(&place), "{place:?} is not to be used");
    }

    fn check(&self) {
        assert_eq!(self.index.len(), self.held.len());
        for (chunk, place) in &self.held {
            assert_eq!(self.index.get(digest(*chunk)).map(|entry| entry.place), Some(*place));
        }
        let in_order = CLASSES.iter().filter_map(|class| self.index.class(*class));
        assert_eq!(in_order.map(|class| class.queues.len()).sum::<usize>(), self.held.len());
        assert_eq!(self.index.quarantined(), self.quarantined.len() as u64);
        let live: u32 = self.index.segments().map(|segment| segment.live).sum();
        assert_eq!(live as usize, self.held.len());
        for (record_bytes, class) in self.index.classes() {
            let of_it = |segment: &&Segment| segment.geometry.record_bytes == record_bytes;
            let mut segments = self.index.segments().filter(of_it);
            let ranked: BTreeSet<(u64, u32)> = segments
                .by_ref()
                .map(|segment| {
                    // So few slots are ranked at each change.
                    assert_eq!(segment.rank(), segment.warmth());
                    let row = self.index.row_of(segment.geometry.segment_id).unwrap();
                    (segment.rank(), row)
                })
                .collect();
            assert_eq!(class.cold, ranked);
        }
    }

    /// Nothing is forgotten: when all is at rest, every slot is free, held or quarantined.
    fn settle(&mut self) {
        while !self.writes.is_empty() {
            self.step(Step::EndWrite(true));
        }
        while !self.reads.is_empty() {
            self.step(Step::EndRead);
        }
        while !self.wipes.is_empty() {
            self.step(Step::EndWipe(true));
        }
        let mut free = 0;
        for class in CLASSES {
            assert_eq!(self.index.class(class).map_or(0, |class| class.leaving), 0);
            while let Some(place) = self.index.take_free(class) {
                self.assert_unused(place);
                free += 1;
            }
        }
        let slots = self.index.segments().count() * SLOTS as usize;
        assert_eq!(free + self.held.len() + self.quarantined.len(), slots);
    }
}

proptest! {
    #[test]
    fn slots_have_one_use_at_a_time_and_none_is_forgotten(steps in steps()) {
        let mut world = World::default();
        world.add_segment(CLASSES[0]);
        world.add_segment(CLASSES[0]);
        world.add_segment(CLASSES[1]);
        for step in steps {
            world.step(step);
            world.check();
        }
        world.settle();
    }
}

/// The rows of two segments of 64 chunks, as they would be taken.
#[test]
fn large_segments_are_ranked_by_use_and_at_once_when_they_are_empty() {
    const CHUNKS: u8 = 64;
    let mut index = Index::default();
    for segment_id in 1..=2 {
        let (record_bytes, slots) = (CLASSES[0], u32::from(CHUNKS));
        let geometry = Geometry { segment_id, store_uuid: [0; 16], record_bytes, slots };
        index.add_segment(SegmentFile::for_tests(std::path::Path::new("/dev/null")), geometry);
    }
    let mut rows: Vec<Vec<u8>> = vec![Vec::new(); 2];
    for chunk in 0..2 * CHUNKS {
        let place = index.take_free(CLASSES[0]).unwrap();
        let held = Held { payload_bytes: 1, write_id: WriteId::new(0) };
        index.publish(place, digest(chunk), held);
        rows[place.row as usize].push(chunk);
    }
    let coldest = |index: &Index| index.class(CLASSES[0]).unwrap().cold.first().copied().unwrap();
    for used in [1, 0, 1] {
        rows[used].iter().for_each(|&chunk| index.touch(digest(chunk)));
        assert_eq!(coldest(&index).1 as usize, 1 - used);
    }
    // A few uses of what is cold do not change which is colder, and a refusal does.
    rows[0][..2].iter().for_each(|&chunk| index.touch(digest(chunk)));
    assert_eq!(coldest(&index).1, 0);
    index.spare_segment(0);
    assert_eq!(coldest(&index).1, 1);
    for &chunk in &rows[0] {
        assert_ne!(coldest(&index), (0, 0), "it holds {chunk} yet");
        let Some(Doomed::Wipe(place)) = index.doom(digest(chunk)) else { panic!("not read") };
        index.end_wipe(place, true);
    }
    assert_eq!(coldest(&index), (0, 0));
}
