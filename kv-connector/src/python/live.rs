//! Open engines, and the end of the interpreter.
//!
//! Python ends a thread that wants the interpreter lock back after the end has begun: it unwinds through our frames, which
//! give up Python objects without the lock, and the process ends by a crash. So no call of ours may want it back by then:
//! before the end all engines are closed, calls that wait return, and later ones are refused with the lock held.

use std::{
    mem, process,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use pyo3::{marker::Ungil, prelude::*};

use super::{background::Background, gone::Gone};
use crate::{CloseReport, Engine, LoadQueue, LockTable, sync::lock_plain};

/// How long the end waits for calls to return.
const RETURN: Duration = Duration::from_secs(5);

/// All of these change under the interpreter lock only, which orders them; `INSIDE` is also counted down by whoever has
/// just got it back.
static ENDS: AtomicBool = AtomicBool::new(false);
/// Calls that gave the lock up and want it back.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The process that these belong to: a fork inherits counts of threads that it does not have.
static OWNER_PID: AtomicU32 = AtomicU32::new(0);
static OPEN: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// An engine that is to be closed at the end, and how long that may take.
struct Entry {
    owner_pid: u32,
    live: Weak<Live>,
    limit: Duration,
}

/// What an engine is until it is closed.
pub(super) struct Live {
    pub(super) engine: Arc<Engine>,
    pub(super) queue: LoadQueue,
    pub(super) locks: LockTable,
    pub(super) background: Background,
    pub(super) gone: Arc<Gone>,
}

impl Live {
    /// Once and again: later calls find nothing to do.
    pub(super) fn close(&self, limit: Duration) -> CloseReport {
        self.queue.close();
        self.background.close();
        self.locks.clear();
        self.engine.close(limit)
    }
}

/// Has an engine closed at the end, whoever still holds it by then.
pub(super) fn register(live: &Arc<Live>, limit: Duration) {
    let mut open = lock_plain(&OPEN);
    open.retain(|entry| entry.live.strong_count() > 0);
    open.push(Entry { owner_pid: process::id(), live: Arc::downgrade(live), limit });
}

/// Whether the interpreter is about to end.
pub(super) fn ends() -> bool {
    ENDS.load(Ordering::Acquire)
}

/// Runs `body` without the interpreter lock; at the end, when it would not come back, with it.
pub(super) fn detached<T: Ungil>(py: Python<'_>, body: impl FnOnce() -> T + Ungil) -> T {
    if ends() {
        return body();
    }
    if OWNER_PID.swap(process::id(), Ordering::AcqRel) != process::id() {
        INSIDE.store(0, Ordering::Release);
    }
    let _inside = Inside::new();
    py.detach(body)
}

/// A call that wants the lock back; it has it when this is dropped.
struct Inside;

impl Inside {
    fn new() -> Self {
        INSIDE.fetch_add(1, Ordering::AcqRel);
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Called by Python before its end, while all threads still run.
#[pyfunction]
#[pyo3(name = "_at_exit")]
pub(super) fn at_exit(py: Python<'_>) {
    let pid = process::id();
    if OWNER_PID.load(Ordering::Acquire) != pid || ENDS.swap(true, Ordering::AcqRel) {
        return;
    }
    let open = mem::take(&mut *lock_plain(&OPEN));
    py.detach(|| {
        for entry in open.iter().filter(|entry| entry.owner_pid == pid) {
            if let Some(live) = entry.live.upgrade() {
                live.close(entry.limit);
            }
        }
        let end = Instant::now() + RETURN;
        while INSIDE.load(Ordering::Acquire) > 0 && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    });
}
