//! What claims share: each object is staged, protected and reserved once, however many claims name it.

use std::collections::HashMap;

use crate::{Effect, Object, ObjectId, StagingError};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not protected by us. It may be cached all the same.
    Idle,
    InFlight,
    Ready,
}

struct Entry {
    bytes: u64,
    /// Living claims that name it.
    claims: usize,
    /// Those of them that are reserved.
    holders: usize,
    stage: Stage,
}

#[derive(Default)]
pub(crate) struct Objects {
    entries: HashMap<ObjectId, Entry>,
    in_flight_bytes: u64,
}

impl Objects {
    /// Notes a claim on `objects`; refuses one whose size contradicts another claim's.
    pub(crate) fn record(&mut self, objects: &[Object]) -> Result<(), StagingError> {
        for &Object { id, bytes } in objects {
            if let Some(known) = self.entries.get(&id).filter(|known| known.bytes != bytes) {
                return Err(StagingError::ObjectSize {
                    object: id,
                    recorded: known.bytes,
                    given: bytes,
                });
            }
        }
        for &Object { id, bytes } in objects {
            let fresh = Entry { bytes, claims: 0, holders: 0, stage: Stage::Idle };
            self.entries.entry(id).or_insert(fresh).claims += 1;
        }
        Ok(())
    }

    /// Undoes [`record`](Self::record).
    pub(crate) fn forget(&mut self, objects: &[Object]) {
        for object in objects {
            self.entry(object.id).claims -= 1;
            if self.entry(object.id).claims == 0 {
                self.entries.remove(&object.id);
            }
        }
    }

    /// Bytes that reserving `objects` adds to the budget.
    pub(crate) fn unreserved_bytes(&self, objects: &[Object]) -> u64 {
        let unheld = objects.iter().filter(|object| self.entries[&object.id].holders == 0);
        unheld.fold(0, |sum, object| sum.saturating_add(object.bytes))
    }

    pub(crate) fn hold(&mut self, objects: &[Object]) {
        objects.iter().for_each(|object| self.entry(object.id).holders += 1);
    }

    /// Undoes [`hold`](Self::hold); returns the bytes that nobody holds any more.
    pub(crate) fn release(&mut self, objects: &[Object], effects: &mut Vec<Effect>) -> u64 {
        let mut freed_bytes = 0;
        for &object in objects {
            let entry = self.entry(object.id);
            entry.holders -= 1;
            if entry.holders > 0 {
                continue;
            }
            freed_bytes += entry.bytes;
            debug_assert!(entry.stage != Stage::InFlight, "protection outlives what is in flight");
            if entry.stage == Stage::Ready {
                entry.stage = Stage::Idle;
                effects.push(Effect::Unprotect(object));
            }
        }
        freed_bytes
    }

    /// Begins to stage those of `objects` that no claim has begun.
    pub(crate) fn start(&mut self, objects: &[Object], effects: &mut Vec<Effect>) {
        for &object in objects {
            let entry = self.entry(object.id);
            if entry.stage == Stage::Idle {
                entry.stage = Stage::InFlight;
                self.in_flight_bytes += object.bytes;
                effects.push(Effect::Stage(object));
            }
        }
    }

    /// The answer to [`Effect::Stage`].
    pub(crate) fn finish(&mut self, object: ObjectId, staged: bool) -> Result<(), StagingError> {
        let in_flight =
            self.entries.get_mut(&object).filter(|entry| entry.stage == Stage::InFlight);
        let entry = in_flight.ok_or(StagingError::NotInFlight { object })?;
        entry.stage = if staged { Stage::Ready } else { Stage::Idle };
        self.in_flight_bytes -= entry.bytes;
        Ok(())
    }

    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    pub(crate) fn are_ready(&self, objects: &[Object]) -> bool {
        objects.iter().all(|object| self.entries[&object.id].stage == Stage::Ready)
    }

    pub(crate) fn any_in_flight(&self, objects: &[Object]) -> bool {
        objects.iter().any(|object| self.entries[&object.id].stage == Stage::InFlight)
    }

    /// Those of `objects` that are not even coming in, and the bytes of those that are.
    pub(crate) fn need(&self, objects: &[Object]) -> (Vec<Object>, u64) {
        let stage = |object: &Object| self.entries[&object.id].stage;
        let cold = objects.iter().filter(|object| stage(object) == Stage::Idle).copied().collect();
        let coming = objects.iter().filter(|object| stage(object) == Stage::InFlight);
        (cold, coming.map(|object| object.bytes).sum())
    }

    fn entry(&mut self, object: ObjectId) -> &mut Entry {
        self.entries.get_mut(&object).expect("a living claim names it")
    }
}
