//! What callers, readers and the clock of a queue share, and the clock.

use std::{
    collections::{HashMap, VecDeque},
    process,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_tiers::{Arena, ArenaConfig};
use nix::sys::eventfd::EventFd;

use super::{bell, task::Task};
use crate::{Engine, EngineError, QueueSection, config::memory, sync::lock_plain};

/// How often the clock looks for room in staging, and how many times before it tells the caller to try anyway.
const ROOM_LOOK: Duration = Duration::from_millis(2);
const ROOM_LOOKS: u32 = 50;

/// How often it looks for loads that nobody takes.
const KEPT_LOOK: Duration = Duration::from_secs(1);

/// One want of one load.
pub(super) type Place = (Arc<Task>, usize);

pub(super) struct Inner {
    pub(super) engine: Arc<Engine>,
    pub(super) arena: Arc<Arena>,
    pub(super) gather: Duration,
    deadline: Duration,
    keep: Duration,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) load_bell: EventFd,
    pub(super) room_bell: EventFd,
    /// Set by callers (Release), cleared by the clock (AcqRel) before it rings: a caller that sets it later is heard.
    pub(super) room_wanted: AtomicBool,
    owner_pid: u32,
}

#[derive(Default)]
pub(super) struct State {
    /// Wants that no step reads yet, in order of arrival.
    pub(super) waiting: VecDeque<Place>,
    /// Nobody else is waited for: a whole step waits.
    pub(super) step_waits: bool,
    /// Chunks wait for memory, which comes back only from loads that are taken while they run.
    pub(super) starved: bool,
    /// By chunk and length: the step that reads it, and who wants it.
    pub(super) reading: HashMap<(ChunkKey, usize), (u64, Vec<Place>)>,
    /// Steps being read, and steps begun.
    pub(super) rounds: usize,
    pub(super) begun: u64,
    pub(super) closed: bool,
    /// Loads in order of submission, each with the time at which it ends.
    deadlines: VecDeque<(Instant, Weak<Task>)>,
    /// All that somebody may still take.
    loads: Vec<Weak<Task>>,
}

/// Whether this process is a fork of the one that made the queue: then no lock may be touched.
pub(super) fn is_forked(inner: &Inner) -> bool {
    process::id() != inner.owner_pid
}

impl Inner {
    pub(super) fn new(engine: Arc<Engine>, config: &QueueSection) -> Result<Self, EngineError> {
        let chunk_bytes = engine.shared.config.chunk_bytes_max;
        let bytes = usize::try_from(chunk_bytes.0).unwrap_or(usize::MAX);
        let arena = ArenaConfig::new(bytes, config.slots(chunk_bytes));
        let arenas = &engine.shared.arenas;
        let beside = arenas.reads.stats().bytes.saturating_add(arenas.staging.stats().bytes);
        let wanted = chunk_bytes.0.saturating_mul(arena.slots as u64);
        memory::check("queue.memory", wanted, beside)?;
        let memory = |source| EngineError::Arena { purpose: "the queue", source };
        Ok(Self {
            engine,
            arena: Arena::new(arena).map_err(memory)?,
            gather: Duration::from_micros(config.gather_us),
            deadline: Duration::from_millis(config.deadline_ms),
            keep: Duration::from_millis(config.keep_ms),
            state: Mutex::default(),
            changed: Condvar::new(),
            load_bell: bell()?,
            room_bell: bell()?,
            room_wanted: AtomicBool::new(false),
            owner_pid: process::id(),
        })
    }

    /// Queues a load; false if nothing is taken any more.
    pub(super) fn submit(&self, task: &Arc<Task>) -> bool {
        self.enter(std::slice::from_ref(task), false)
    }

    /// Queues the loads of a step that is whole; likewise.
    pub(super) fn submit_step(&self, tasks: &[Arc<Task>]) -> bool {
        self.enter(tasks, true)
    }

    fn enter(&self, tasks: &[Arc<Task>], is_whole: bool) -> bool {
        if is_forked(self) {
            return false;
        }
        let mut state = lock_plain(&self.state);
        if state.closed {
            return false;
        }
        let ends = Instant::now() + self.deadline;
        for task in tasks.iter().filter(|task| !task.is_done()) {
            state.deadlines.push_back((ends, Arc::downgrade(task)));
            state.loads.push(Arc::downgrade(task));
            state.waiting.extend((0..task.wants.len()).map(|place| (Arc::clone(task), place)));
        }
        state.step_waits |= is_whole && !state.waiting.is_empty();
        drop(state);
        if tasks.iter().any(|task| task.is_done()) {
            self.ring_loads();
        }
        self.changed.notify_all();
        true
    }

    /// What waits is a step that is whole.
    pub(super) fn end_step(&self) {
        if is_forked(self) {
            return;
        }
        let mut state = lock_plain(&self.state);
        state.step_waits = !state.waiting.is_empty();
        drop(state);
        self.changed.notify_all();
    }

    /// Tells the caller that a load has ended, or is to be taken as far as it is.
    pub(super) fn ring_loads(&self) {
        // Fails only if the counter is full, and then it is readable already.
        let _ = self.load_bell.write(1);
    }

    pub(super) fn close(&self) {
        let mut state = lock_plain(&self.state);
        state.closed = true;
        state.waiting.clear();
        let open: Vec<_> = state.deadlines.drain(..).collect();
        drop(state);
        for task in open.iter().filter_map(|(_, task)| task.upgrade()) {
            task.end();
        }
        self.ring_loads();
        self.changed.notify_all();
    }

    pub(super) fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        limit: Duration,
    ) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// The clock: ends loads at their deadlines, takes memory back from loads that nobody takes, and looks for room.
    pub(super) fn keep_time(&self) {
        let (mut room_looks, mut looked) = (0, Instant::now());
        let mut state = lock_plain(&self.state);
        while !state.closed {
            let now = Instant::now();
            let ended = due(&mut state.deadlines, now);
            if !ended.is_empty() {
                drop(state);
                if ended.iter().filter(|task| task.end()).count() > 0 {
                    self.ring_loads();
                }
                state = lock_plain(&self.state);
                continue;
            }
            if now >= looked + self.keep.min(KEPT_LOOK) {
                looked = now;
                state
                    .loads
                    .retain(|task| task.upgrade().is_some_and(|task| !task.expire(self.keep)));
            }
            let mut limit = next(&state, now).min(self.keep);
            if self.room_wanted.load(Ordering::Acquire) {
                room_looks += 1;
                limit = limit.min(ROOM_LOOK);
                if self.engine.shared.arenas.staging.free_slots() > 0 || room_looks > ROOM_LOOKS {
                    room_looks = 0;
                    self.room_wanted.swap(false, Ordering::AcqRel);
                    let _ = self.room_bell.write(1);
                }
            }
            state = self.wait(state, limit);
        }
    }
}

/// Takes out what is due; loads that are gone are dropped on the way.
fn due(queue: &mut VecDeque<(Instant, Weak<Task>)>, now: Instant) -> Vec<Arc<Task>> {
    let mut found = Vec::new();
    while let Some((at, task)) = queue.front() {
        let task = task.upgrade();
        if *at > now && task.is_some() {
            break;
        }
        found.extend(task);
        queue.pop_front();
    }
    found
}

fn next(state: &State, now: Instant) -> Duration {
    const IDLE: Duration = Duration::from_secs(1);
    state.deadlines.front().map_or(IDLE, |(at, _)| at.saturating_duration_since(now).min(IDLE))
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("arena", &self.arena).finish_non_exhaustive()
    }
}
