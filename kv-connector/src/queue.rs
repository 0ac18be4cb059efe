//! Loads of callers that must not wait: submitted at once, pooled into steps, taken when they are done.
//!
//! What is submitted while a step is read is pooled into the next one; two steps overlap, so that the end of one does
//! not leave tiers idle. Chunks that several loads want are read once. Every load ends at its deadline, with the
//! chunks it has got by then; a load that nobody takes loses its memory some time after.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use nix::sys::eventfd::{EfdFlags, EventFd};

use self::{
    inner::{Inner, is_forked},
    task::Task,
};
use crate::{Engine, EngineError, QueueSection, sync::lock_plain};

mod inner;
mod rounds;
mod task;

/// Steps read at a time.
const ROUNDS_MAX: usize = 2;

/// One chunk of a submitted load.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Wanted {
    /// Which chunk.
    pub key: ChunkKey,
    /// Length of its payload; of another length it is a miss.
    pub bytes: usize,
    /// The tensor-parallel rank that waits for it.
    pub rank: u16,
}

impl Wanted {
    /// A chunk for rank 0.
    pub fn new(key: ChunkKey, bytes: usize) -> Self {
        Self { key, bytes, rank: 0 }
    }
}

/// Pools submitted loads into steps of one engine. Shared by reference between threads.
#[derive(Debug)]
pub struct LoadQueue {
    inner: Arc<Inner>,
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
}

impl LoadQueue {
    /// A queue in front of `engine`, with memory of its own.
    ///
    /// # Errors
    /// If the memory or a thread cannot be had.
    pub fn new(engine: Arc<Engine>, config: &QueueSection) -> Result<Self, EngineError> {
        let inner = Arc::new(Inner::new(engine, config)?);
        let queue = Self { inner, threads: std::sync::Mutex::default() };
        for _ in 0..ROUNDS_MAX {
            queue.spawn("kvb-load", Inner::work)?;
        }
        queue.spawn("kvb-clock", Inner::keep_time)?;
        Ok(queue)
    }

    fn spawn(&self, name: &str, run: fn(&Inner)) -> Result<(), EngineError> {
        let inner = Arc::clone(&self.inner);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || run(&inner));
        let thread = thread.map_err(|error| EngineError::system("a thread of the queue", error))?;
        lock_plain(&self.threads).push(thread);
        Ok(())
    }

    /// Queues a load and returns. In a forked child, and once closed, everything is a miss at once.
    pub fn submit(&self, wants: Vec<Wanted>) -> Load {
        let task = self.task(wants);
        if !self.inner.submit(&task) {
            task.end();
        }
        Load { task, inner: Arc::clone(&self.inner) }
    }

    fn task(&self, wants: Vec<Wanted>) -> Arc<Task> {
        let shared = &self.inner.engine.shared;
        let digests = wants.iter().map(|want| want.key.digest());
        let retrieving = shared.is_usable().then(|| shared.retrieving(digests)).flatten();
        Arc::new(Task::new(wants, retrieving))
    }

    /// Queues the loads of one whole step of the caller, one for each list, and returns. No other loads are waited for:
    /// what reads next takes all of them.
    pub fn submit_step(&self, loads: Vec<Vec<Wanted>>) -> Vec<Load> {
        let tasks: Vec<Arc<Task>> = loads.into_iter().map(|wants| self.task(wants)).collect();
        if !self.inner.submit_step(&tasks) {
            for task in &tasks {
                task.end();
            }
        }
        tasks.into_iter().map(|task| Load { task, inner: Arc::clone(&self.inner) }).collect()
    }

    /// Says that the caller's step is whole: no other loads are waited for than those that were submitted. Does nothing if
    /// none waits.
    pub fn end_step(&self) {
        self.inner.end_step();
    }

    /// An eventfd that becomes readable when a load has ended, or must be taken as far as it is for want of memory.
    pub fn load_fd(&self) -> BorrowedFd<'_> {
        self.inner.load_bell.as_fd()
    }

    /// An eventfd that becomes readable when there is room for stores again after [`ring_when_room`](Self::ring_when_room).
    pub fn room_fd(&self) -> BorrowedFd<'_> {
        self.inner.room_bell.as_fd()
    }

    /// Has [`room_fd`](Self::room_fd) told once when staging has room, or after a tenth of a second.
    pub fn ring_when_room(&self) {
        if !is_forked(&self.inner) {
            self.inner.room_wanted.store(true, Ordering::Release);
            self.inner.changed.notify_all();
        }
    }

    /// Ends all loads with what they have got, and the threads. A step that is being read ends by its own deadline: what
    /// it brings is dropped.
    pub fn close(&self) {
        if is_forked(&self.inner) {
            return;
        }
        self.inner.close();
        let end = Instant::now() + Duration::from_secs(2);
        let threads = std::mem::take(&mut *lock_plain(&self.threads));
        while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        for thread in threads.into_iter().filter(JoinHandle::is_finished) {
            // What panicked was told where it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for LoadQueue {
    fn drop(&mut self) {
        if is_forked(&self.inner) {
            // Locks may be held for ever here, and the memory is not mapped.
            let _leaked = std::mem::ManuallyDrop::new(Arc::clone(&self.inner));
            return;
        }
        self.close();
    }
}

/// A submitted load. Dropping it gives up what is not taken.
#[derive(Debug)]
pub struct Load {
    task: Arc<Task>,
    inner: Arc<Inner>,
}

impl Load {
    /// Whether every chunk is there or a miss.
    pub fn is_done(&self) -> bool {
        is_forked(&self.inner) || self.task.is_done()
    }

    /// Chunks wanted.
    pub fn wants(&self) -> &[Wanted] {
        &self.task.wants
    }

    /// Waits until there is something to take or it is done, `limit` at most; whether one is so.
    pub fn wait(&self, limit: Duration) -> bool {
        is_forked(&self.inner) || self.task.wait(limit)
    }

    /// Hands over what has come since the last call: `copy` gets each chunk's place and bytes, each once. `None` while it
    /// is not done; then one answer per chunk, whether it was handed over, given once: later all are misses.
    ///
    /// Memory serves other chunks only when it was handed over: a load larger than the queue's memory must be taken
    /// while it runs.
    pub fn take(&self, copy: impl FnMut(usize, &[u8])) -> Option<Vec<bool>> {
        if is_forked(&self.inner) {
            return Some(vec![false; self.task.wants.len()]);
        }
        let answer = self.task.take(copy);
        self.inner.changed.notify_all();
        answer
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if is_forked(&self.inner) {
            let _leaked = std::mem::ManuallyDrop::new(Arc::clone(&self.task));
            return;
        }
        self.task.abandon();
        self.inner.changed.notify_all();
    }
}

fn bell() -> Result<EventFd, EngineError> {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| EngineError::system("an eventfd", errno))
}
