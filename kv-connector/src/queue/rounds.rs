//! The readers of a queue: each takes what waits, reads it as one step, and hands it to all who want it.

use std::{
    collections::hash_map::Entry,
    mem,
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
use crate::{Arrived, Want, sync::lock_plain};

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

/// One step.
struct Round {
    number: u64,
    units: Vec<Unit>,
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
    fn next_round(&self) -> Option<Round> {
        let mut state = lock_plain(&self.state);
        let mut gathered_at = None;
        loop {
            if state.closed {
                return None;
            }
            if state.waiting.is_empty() {
                gathered_at = None;
                state.starved = false;
                state = self.wait(state, IDLE);
                continue;
            }
            // While something is read, others gather by themselves.
            let now = Instant::now();
            let until = *gathered_at.get_or_insert(now + self.gather);
            if state.rounds == 0 && now < until && !state.step_waits {
                state = self.wait(state, until - now);
                continue;
            }
            let (units, ended) = state.take(&self.arena);
            state.step_waits &= !state.waiting.is_empty();
            let starved = units.is_empty() && !state.waiting.is_empty();
            let was_starved = mem::replace(&mut state.starved, starved);
            if ended || starved && !was_starved {
                self.ring_loads();
            }
            if units.is_empty() {
                if starved {
                    state = self.wait(state, STARVED);
                }
                continue;
            }
            state.rounds += 1;
            state.begun += 1;
            let number = state.begun;
            return Some(Round { number, units });
        }
    }

    fn read(&self, Round { number, units }: Round) {
        let names: Vec<_> = units.iter().map(Unit::name).collect();
        // What panicked was told where it happened.
        let _ = catch_unwind(AssertUnwindSafe(|| self.load(number, units, &names)));
        // What has no answer by now is a miss.
        names.iter().for_each(|name| self.settle(number, name, None));
        lock_plain(&self.state).rounds -= 1;
        self.changed.notify_all();
    }

    /// The answer for all who want a chunk that this step reads, unless they have it.
    fn settle(&self, round: u64, name: &(ChunkKey, usize), chunk: Option<Landed>) {
        let mut state = lock_plain(&self.state);
        // Another step may read it by now, for others.
        if state.reading.get(name).is_none_or(|(number, _)| *number != round) {
            return;
        }
        let Some((_, places)) = state.reading.remove(name) else { return };
        let starved = state.starved;
        drop(state);
        let chunk = chunk.map(Arc::new);
        let mut tell = false;
        for (task, place) in places {
            let settled = task.settle(place, chunk.clone());
            tell |= settled.has_ended || starved && settled.is_first;
        }
        // Who is told of a load finds it done, unless memory is wanted: LMCache's own checks ask once.
        if tell {
            self.ring_loads();
        }
    }

    fn load(&self, round: u64, units: Vec<Unit>, names: &[(ChunkKey, usize)]) {
        let keys: Vec<ChunkKey> = units.iter().map(|unit| unit.key.clone()).collect();
        let lease = self.engine.lease(&keys);
        let mut wants: Vec<Want<'_>> =
            names.iter().map(|(key, bytes)| Want::handed(key, *bytes)).collect();
        for (want, unit) in wants.iter_mut().zip(&units) {
            want.rank = unit.rank;
        }
        let mut slots: Vec<Option<Slot>> = units.into_iter().map(|unit| Some(unit.slot)).collect();
        self.engine.load_handing(&lease, &mut wants, |places, arrived| {
            // Of one chunk and length there is one want.
            if let [place] = *places {
                self.arrive(round, &names[place], &mut slots[place], arrived);
            }
        });
        for ((name, want), slot) in names.iter().zip(&wants).zip(slots) {
            let slot = slot.filter(|_| want.outcome.is_hit());
            let chunk = slot.map(|slot| Landed::Copied { slot, bytes: name.1 });
            self.settle(round, name, chunk);
        }
    }
    /// Verified bytes: a whole chunk is an answer, a piece is put where it belongs.
    fn arrive(
        &self,
        round: u64,
        name: &(ChunkKey, usize),
        slot: &mut Option<Slot>,
        arrived: Arrived,
    ) {
        if arrived.bytes().len() == name.1 && self.has_room() {
            *slot = None;
            self.settle(round, name, Some(Landed::Whole(arrived)));
            return;
        }
        let at = arrived.payload_offset();
        let room =
            slot.as_mut().and_then(|slot| slot.get_mut(at..)?.get_mut(..arrived.bytes().len()));
        if let Some(room) = room {
            room.copy_from_slice(arrived.bytes());
        }
    }

    /// Whether the engine can do without the memory of one more chunk until it is taken.
    fn has_room(&self) -> bool {
        let reads = &self.engine.shared.arenas.reads;
        2 * reads.free_slots() > reads.slots()
    }
}

impl State {
    /// Takes from the front what there is memory for; of more than that, half the memory: the other half is handed over
    /// meanwhile. Chunks that are being read get one more who wants them. Also
    /// says whether a load ended by it.
    fn take(&mut self, arena: &Arc<Arena>) -> (Vec<Unit>, bool) {
        let fits = self.waiting.len() <= arena.free_slots();
        let most = if fits { self.waiting.len() } else { arena.slots().div_ceil(ROUNDS_MAX) };
        let number = self.begun + 1;
        let (mut units, mut ended) = (Vec::new(), false);
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
                ended |= task.settle(place, None).has_ended;
            } else {
                let key = want.key.clone();
                match self.reading.entry((key.clone(), bytes)) {
                    Entry::Occupied(places) => places.into_mut().1.push((task, place)),
                    Entry::Vacant(places) => {
                        let Some(slot) = arena.try_take() else { break };
                        places.insert((number, vec![(task, place)]));
                        units.push(Unit { key, bytes, rank, slot });
                    }
                }
                self.waiting.pop_front();
            }
        }
        (units, ended)
    }
}
