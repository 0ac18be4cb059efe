//! Copies between a caller's buffers and memory of ours, on threads that need no interpreter lock.
//!
//! Buffers belong to the Python object that was returned for them: they are given back when it is dropped, also while a
//! copy waits; no copy runs afterwards.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use pyo3::prelude::*;

use super::{
    Buffer,
    engine::name,
    errors::{ClosedError, ForkedError, OpenError},
    load::fill,
};
use crate::{Engine, Load, StoreRefusal, Stored, sync::lock_plain};

/// How long a filling thread waits for one load before it looks at the others.
const LOOK: Duration = Duration::from_millis(1);
/// Between two looks for room in staging.
const ROOM_LOOK: Duration = Duration::from_millis(2);
/// How long `close` waits for a copy.
const END: Duration = Duration::from_secs(2);

/// Buffers, until they are given back, and what became of them.
pub(super) struct Job<W, A> {
    pub(super) work: W,
    /// Held while bytes are copied.
    buffers: Mutex<Vec<Buffer>>,
    /// Set by the owner (Release) before it takes the buffers back, read by the thread (Acquire) under their lock.
    dropped: AtomicBool,
    answer: Mutex<Option<A>>,
    answered: Condvar,
    owner_pid: u32,
}

/// Buffers to be filled by a load.
pub(super) type Filling = Job<Load, Vec<bool>>;
/// Buffers whose bytes are to be staged.
pub(super) type Staging = Job<Chunks, Vec<&'static str>>;

/// Whose bytes, and until when they may wait for room.
pub(super) struct Chunks {
    engine: Arc<Engine>,
    keys: Vec<ChunkKey>,
    ends: Instant,
}

impl<W, A> Job<W, A> {
    fn new(work: W, buffers: Vec<Buffer>) -> Arc<Self> {
        Arc::new(Self {
            work,
            buffers: Mutex::new(buffers),
            dropped: AtomicBool::new(false),
            answer: Mutex::default(),
            answered: Condvar::new(),
            owner_pid: process::id(),
        })
    }

    /// Fails in a fork: its threads are not there, and locks may be held for ever.
    pub(super) fn ours(&self) -> PyResult<&Self> {
        if process::id() == self.owner_pid {
            return Ok(self);
        }
        Err(ForkedError::new_err("this belongs to the parent process"))
    }

    /// Takes the buffers back. No byte is copied after this.
    pub(super) fn abandon(&self) {
        if self.ours().is_err() {
            return;
        }
        self.dropped.store(true, Ordering::Release);
        drop(mem::take(&mut *lock_plain(&self.buffers)));
    }

    fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }

    fn settle(&self, answer: A) {
        *lock_plain(&self.answer) = Some(answer);
        self.answered.notify_all();
    }

    pub(super) fn is_done(&self) -> bool {
        lock_plain(&self.answer).is_some()
    }

    /// Waits for the answer, `limit` at most; whether it is there.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let answer = lock_plain(&self.answer);
        let waited = self.answered.wait_timeout_while(answer, limit, |it| it.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_some()
    }
}

impl<W, A: Clone> Job<W, A> {
    pub(super) fn answer(&self) -> Option<A> {
        lock_plain(&self.answer).clone()
    }
}

impl Filling {
    /// Copies what has come; whether that was all. A panic ends it: it was told where it happened.
    fn advance_or_end(&self) -> bool {
        catch_unwind(AssertUnwindSafe(|| self.advance())).unwrap_or_else(|_| {
            self.settle(vec![false; self.work.wants().len()]);
            true
        })
    }

    /// Copies what has come; whether that was all.
    fn advance(&self) -> bool {
        let buffers = lock_plain(&self.buffers);
        if self.is_dropped() {
            return true;
        }
        let Some(hits) = fill(&self.work, &buffers) else { return false };
        drop(buffers);
        self.settle(hits);
        true
    }
}

impl Staging {
    fn run(&self) {
        let places = 0..self.work.keys.len();
        let mut scratch = Vec::new();
        // What panicked was told where it happened.
        let stage = |place| {
            catch_unwind(AssertUnwindSafe(|| self.stage(place, &mut scratch))).unwrap_or("failed")
        };
        self.settle(places.map(stage).collect());
    }

    /// One chunk. While it waits for room, the buffers can be taken back.
    fn stage(&self, place: usize, scratch: &mut Vec<u8>) -> &'static str {
        loop {
            let buffers = lock_plain(&self.buffers);
            if self.is_dropped() {
                return "dropped";
            }
            let bytes = buffers[place].bytes(scratch);
            let stored = self.work.engine.store(&self.work.keys[place], bytes);
            drop(buffers);
            let is_full = matches!(
                stored,
                Stored::Refused(StoreRefusal::StagingFull | StoreRefusal::QueueFull)
            );
            if !is_full || Instant::now() >= self.work.ends {
                return name(stored);
            }
            thread::sleep(ROOM_LOOK);
        }
    }
}

/// The two threads, started when there is something for them.
#[derive(Default)]
pub(super) struct Background {
    fills: Lane<Filling>,
    stores: Lane<Staging>,
}

impl Background {
    pub(super) fn fill(&self, load: Load, buffers: Vec<Buffer>) -> PyResult<Arc<Filling>> {
        let job = Job::new(load, buffers);
        self.fills.push("kvb-fill", &job, fill_all)?;
        Ok(job)
    }

    pub(super) fn stage(
        &self,
        engine: &Arc<Engine>,
        keys: Vec<ChunkKey>,
        buffers: Vec<Buffer>,
        wait: Duration,
    ) -> PyResult<Arc<Staging>> {
        let ends = Instant::now() + wait;
        let job = Job::new(Chunks { engine: Arc::clone(engine), keys, ends }, buffers);
        self.stores.push("kvb-stage", &job, stage_all)?;
        Ok(job)
    }

    /// Ends both threads; after the queue and before the engine is closed: what is open by then ends with what it has.
    pub(super) fn close(&self) {
        self.fills.close();
        self.stores.close();
    }
}

/// Jobs on their way to one thread.
struct Lane<J> {
    inbox: Arc<Inbox<J>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Inbox<J> {
    state: Mutex<Jobs<J>>,
    changed: Condvar,
}

struct Jobs<J> {
    new: Vec<Arc<J>>,
    closed: bool,
}

impl<J> Default for Lane<J> {
    fn default() -> Self {
        let state = Mutex::new(Jobs { new: Vec::new(), closed: false });
        Self { inbox: Arc::new(Inbox { state, changed: Condvar::new() }), thread: Mutex::default() }
    }
}

impl<J: Send + Sync + 'static> Lane<J> {
    fn push(&self, name: &str, job: &Arc<J>, run: fn(&Inbox<J>)) -> PyResult<()> {
        let mut thread = lock_plain(&self.thread);
        if thread.is_none() {
            let inbox = Arc::clone(&self.inbox);
            let started = thread::Builder::new().name(name.to_owned()).spawn(move || run(&inbox));
            *thread = Some(started.map_err(|error| OpenError::new_err(error.to_string()))?);
        }
        let mut state = lock_plain(&self.inbox.state);
        if state.closed {
            return Err(ClosedError::new_err("the engine is closed"));
        }
        state.new.push(Arc::clone(job));
        drop(state);
        self.inbox.changed.notify_all();
        Ok(())
    }

    fn close(&self) {
        lock_plain(&self.inbox.state).closed = true;
        self.inbox.changed.notify_all();
        let Some(thread) = lock_plain(&self.thread).take() else { return };
        let end = Instant::now() + END;
        while !thread.is_finished() && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            // What panicked was told where it happened.
            let _ = thread.join();
        }
    }
}

impl<J> Inbox<J> {
    /// What is new; waits for something while `idle`. None once closed, when nothing is new.
    fn take(&self, idle: bool) -> Option<Vec<Arc<J>>> {
        let mut state = lock_plain(&self.state);
        while idle && state.new.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if idle && state.new.is_empty() { None } else { Some(mem::take(&mut state.new)) }
    }
}

fn fill_all(inbox: &Inbox<Filling>) {
    let mut open: Vec<Arc<Filling>> = Vec::new();
    while let Some(new) = inbox.take(open.is_empty()) {
        open.extend(new);
        open.retain(|job| !job.advance_or_end());
        if let Some(first) = open.first() {
            first.work.wait(LOOK);
        }
    }
}

fn stage_all(inbox: &Inbox<Staging>) {
    while let Some(jobs) = inbox.take(true) {
        jobs.iter().for_each(|job| job.run());
    }
}
