//! Draining and the orderly end, both bounded.

use std::{
    sync::atomic::Ordering,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    CloseReport, Engine, FlushReport,
    clock::{now_ns, ns_of},
    shared::Shared,
    sync::lock_plain,
};

const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Shared {
    pub(crate) fn flush(&self, deadline: Duration) -> FlushReport {
        if self.is_forked() {
            return FlushReport { drained: false, pending: 0 };
        }
        let _open = self.writeback.begin_flush();
        self.ring_all();
        wait_until(Instant::now() + deadline, || self.writeback.is_drained());
        let pending = self.writeback.pending();
        FlushReport { drained: pending == 0, pending: pending as u64 }
    }
}

pub(crate) fn close(engine: &Engine, deadline: Duration) -> CloseReport {
    let shared = &engine.shared;
    if shared.is_forked() {
        return CloseReport::default();
    }
    let mut threads = lock_plain(&engine.threads);
    if shared.closed.swap(true, Ordering::AcqRel) && threads.is_empty() {
        return CloseReport { drained: true, ..CloseReport::default() };
    }
    let end = Instant::now() + deadline;
    let claims_by_ns = now_ns().saturating_add(ns_of(deadline));
    shared.desks.iter().flatten().for_each(|desk| desk.close(claims_by_ns));
    let flushed = shared.flush(deadline);
    let left = end.saturating_duration_since(Instant::now());
    let by_ns = now_ns().saturating_add(ns_of(left));
    shared.tiers.iter().for_each(|tier| tier.ask_to_close(by_ns));
    let leaked = join(std::mem::take(&mut *threads), end);
    if let Some(socket) = &engine.socket {
        socket.close();
    }
    shared.cache.clear();
    let report = CloseReport {
        drained: flushed.drained,
        abandoned_chunks: flushed.pending,
        leaked_threads: leaked,
    };
    tracing::info!(?report, "engine closed");
    report
}

/// Joins what ends in time; the number of those that did not.
fn join(threads: Vec<JoinHandle<()>>, end: Instant) -> u64 {
    wait_until(end, || threads.iter().all(JoinHandle::is_finished));
    let (ended, stuck): (Vec<_>, Vec<_>) = threads.into_iter().partition(JoinHandle::is_finished);
    for thread in ended {
        // A panic was caught and told where it happened.
        let _ = thread.join();
    }
    stuck.len() as u64
}

fn wait_until(end: Instant, done: impl Fn() -> bool) {
    while !done() && Instant::now() < end {
        thread::sleep(LOOK_EVERY);
    }
}
