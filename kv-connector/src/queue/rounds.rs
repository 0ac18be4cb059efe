//! The readers of a queue: each takes what waits, reads it as one step, and hands it to all who want it.

use std::{
    collections::hash_map::Entry,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_tiers::{Arena, Slot};

use super::{
    ROUNDS_MAX,
    inner::{Inner, State},
    task::Landed,
};
use crate::{Want, sync::lock_plain};

const IDLE: Duration = Duration::from_secs(1);
/// Between two looks for free memory: who takes a load does not tell when its last chunk is dropped.
const STARVED: Duration = Duration::from_millis(1);

/// One chunk of a step.
struct Unit {
    key: ChunkKey,
    bytes: usize,
    rank: u16,
    slot: Slot,
}

impl Unit {
    fn name(&self) -> (ChunkKey, usize) {
        (self.key.clone(), self.bytes)
    }
}

impl Inner {
    /// A reader, until the queue is closed.
    pub(super) fn work(&self) {
        while let Some(round) = self.next_round() {
            self.read(round);
        }
    }

    /// What waits; none once the queue is closed.
    fn next_round(&self) -> Option<Vec<Unit>> {
        let mut state = lock_plain(&self.state);
        let mut gathered_at = None;
        loop {
            if state.closed {
                return None;
            }
            if state.waiting.is_empty() {
                gathered_at = None;
                state = self.wait(state, IDLE);
                continue;
            }
            // While something is read, others gather by themselves.
            let now = Instant::now();
            let until = *gathered_at.get_or_insert(now + self.gather);
            if state.rounds == 0 && now < until {
                state = self.wait(state, until - now);
                continue;
            }
            let units = state.take(&self.arena);
            if units.is_empty() {
                self.ring_loads();
                if !state.waiting.is_empty() {
                    state = self.wait(state, STARVED);
                }
                continue;
            }
            state.rounds += 1;
            return Some(units);
        }
    }

    fn read(&self, mut units: Vec<Unit>) {
        let loaded = catch_unwind(AssertUnwindSafe(|| self.load(&mut units)));
        let hits = loaded.unwrap_or_else(|_| vec![false; units.len()]);
        let mut state = lock_plain(&self.state);
        state.rounds -= 1;
        let mut answers = Vec::with_capacity(units.len());
        for (unit, hit) in units.into_iter().zip(hits) {
            let places = state.reading.remove(&unit.name()).unwrap_or_default();
            let Unit { slot, bytes, .. } = unit;
            answers.push((places, hit.then(|| Arc::new(Landed { slot, bytes }))));
        }
        drop(state);
        for (places, chunk) in answers {
            for (task, place) in places {
                task.settle(place, chunk.clone());
            }
        }
        self.ring_loads();
        self.changed.notify_all();
    }

    fn load(&self, units: &mut [Unit]) -> Vec<bool> {
        let keys: Vec<ChunkKey> = units.iter().map(|unit| unit.key.clone()).collect();
        let lease = self.engine.lease(&keys);
        let mut wants: Vec<Want<'_>> = units
            .iter_mut()
            .map(|Unit { key, bytes, rank, slot }| Want {
                rank: *rank,
                ..Want::new(key, &mut slot[..*bytes])
            })
            .collect();
        self.engine.load(&lease, &mut wants);
        wants.iter().map(|want| want.outcome.is_hit()).collect()
    }
}

impl State {
    /// Takes from the front what there is memory for; of more than that, half the memory: the other half is handed over
    /// meanwhile. Chunks that are being read get one more who wants them.
    fn take(&mut self, arena: &Arc<Arena>) -> Vec<Unit> {
        let fits = self.waiting.len() <= arena.free_slots();
        let most = if fits { self.waiting.len() } else { arena.slots().div_ceil(ROUNDS_MAX) };
        let mut units = Vec::new();
        while units.len() < most
            && let Some((task, place)) = self.waiting.front()
        {
            let (task, place) = (Arc::clone(task), *place);
            let want = &task.wants[place];
            let (bytes, rank) = (want.bytes, want.rank);
            if task.is_done() {
                self.waiting.pop_front();
            } else if bytes > arena.slot_bytes() {
                self.waiting.pop_front();
                task.settle(place, None);
            } else {
                let key = want.key.clone();
                match self.reading.entry((key.clone(), bytes)) {
                    Entry::Occupied(places) => places.into_mut().push((task, place)),
                    Entry::Vacant(places) => {
                        let Some(slot) = arena.try_take() else { break };
                        places.insert(vec![(task, place)]);
                        units.push(Unit { key, bytes, rank, slot });
                    }
                }
                self.waiting.pop_front();
            }
        }
        units
    }
}
