//! Threads for blocking calls. A call on a hung mount cannot be cancelled: its thread, and what it uses, is lost until
//! the mount answers, so there is a fixed number of threads, and the tier knows since when each one works.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use nix::sys::eventfd::EventFd;

use super::{
    jobs::{Done, Job, perform},
    lease::Beat,
    publish::Place,
};

/// What comes back to the tier's thread.
#[derive(Debug)]
pub(super) enum Message {
    Done { lane: LaneId, key: u64, done: Done },
    Beat(Beat),
}

/// Which threads a job ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaneId {
    /// Reads and writes.
    Data,
    /// Look-ups, removals, counting: short calls that must not wait behind long ones.
    Small,
}

/// Some threads and the jobs they work on: never more jobs than threads, so that nothing waits out of the tier's sight.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: mpsc::Sender<(u64, Job)>,
    threads: usize,
    /// Since when, by job.
    running: HashMap<u64, u64>,
}

impl Lane {
    pub(super) fn start(
        id: LaneId,
        threads: u32,
        place: &Arc<Place>,
        done: &mpsc::Sender<Message>,
        wake: &Arc<EventFd>,
    ) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let (queue, place) = (Arc::clone(&queue), Arc::clone(place));
            let (done, wake) = (done.clone(), Arc::clone(wake));
            // Never joined: a thread ends when the lane is dropped and its last call returns.
            thread::Builder::new()
                .name("kv-shared-io".to_owned())
                .spawn(move || serve(id, &queue, &place, &done, &wake))?;
        }
        Ok(Self { jobs, threads: threads as usize, running: HashMap::new() })
    }

    pub(super) fn has_room(&self) -> bool {
        self.running.len() < self.threads
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    pub(super) fn send(&mut self, key: u64, job: Job, now_ns: u64) {
        // Threads end only after the lane.
        if self.jobs.send((key, job)).is_ok() {
            self.running.insert(key, now_ns);
        }
    }

    pub(super) fn ended(&mut self, key: u64) {
        self.running.remove(&key);
    }

    /// From when on all threads count as hung, if none comes back; `None` while one is free.
    pub(super) fn hung_from_ns(&self, timeout_ns: u64) -> Option<u64> {
        let youngest_ns = self.running.values().max()?;
        (!self.has_room()).then(|| youngest_ns.saturating_add(timeout_ns))
    }

    pub(super) fn is_hung(&self, now_ns: u64, timeout_ns: u64) -> bool {
        self.hung_from_ns(timeout_ns).is_some_and(|from_ns| now_ns >= from_ns)
    }
}

fn serve(
    lane: LaneId,
    queue: &Mutex<mpsc::Receiver<(u64, Job)>>,
    place: &Place,
    messages: &mpsc::Sender<Message>,
    wake: &EventFd,
) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((key, job)) = next else { return };
        let done = perform(job, place);
        // If the tier is gone, dropping the message frees slot and record.
        if messages.send(Message::Done { lane, key, done }).is_err() {
            return;
        }
        // It fails only if the counter is full, and then it is readable.
        let _ = wake.write(1);
    }
}
