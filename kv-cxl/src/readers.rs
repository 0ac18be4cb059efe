//! Threads that read a medium, so that as many reads are under way at once: a device that sleeps on flash answers many
//! in the time of one.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{FastTierError, MediumReader, copy::PendingRead};

/// How long a drop waits for a read that a device does not answer.
const END_WAIT: Duration = Duration::from_secs(10);

/// A bounded number of threads, each with one read at a time.
pub(crate) struct Readers {
    jobs: Option<Sender<PendingRead>>,
    ended: Receiver<Ended>,
    in_flight: usize,
    /// Readable when something has ended.
    bell: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

/// A read that ended.
pub(crate) struct Ended {
    pub(crate) read: PendingRead,
    /// Requests that the medium took for it.
    pub(crate) result: Result<u64, FastTierError>,
}

impl Readers {
    /// Starts `count` threads.
    pub(crate) fn start(count: usize, medium: &Arc<dyn MediumReader>) -> std::io::Result<Self> {
        let bell =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let bell = Arc::new(bell);
        let (jobs, todo) = channel();
        let (tell, ended) = channel();
        let todo = Arc::new(Mutex::new(todo));
        let start = |_| {
            let (medium, todo) = (Arc::clone(medium), Arc::clone(&todo));
            let (tell, bell) = (tell.clone(), Arc::clone(&bell));
            let name = "kv-cxl-read".to_owned();
            thread::Builder::new().name(name).spawn(move || work(&*medium, &todo, &tell, &bell))
        };
        let threads = (0..count).map(start).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { jobs: Some(jobs), ended, in_flight: 0, bell, threads })
    }

    /// Reads that can begin at once.
    pub(crate) fn room(&self) -> usize {
        self.threads.len().saturating_sub(self.in_flight)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Hands a read to a thread, which owns it until it has ended. Gives it back if there are no threads any more.
    pub(crate) fn begin(&mut self, read: PendingRead) -> Option<PendingRead> {
        let Some(jobs) = &self.jobs else { return Some(read) };
        if let Err(unsent) = jobs.send(read) {
            return Some(unsent.0);
        }
        self.in_flight += 1;
        None
    }

    /// The next read that has ended.
    pub(crate) fn next_ended(&mut self) -> Option<Ended> {
        if self.in_flight == 0 {
            return None;
        }
        match self.ended.try_recv() {
            Ok(ended) => {
                self.in_flight -= 1;
                Some(ended)
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
        }
    }

    /// Before looking: what ends from here on rings again.
    pub(crate) fn hush(&self) {
        let _ = self.bell.read();
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl fmt::Debug for Readers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readers")
            .field("threads", &self.threads.len())
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.jobs = None;
        // A read that the device holds longer is left behind, with the slot and the medium that its thread owns.
        loop {
            match self.ended.recv_timeout(END_WAIT) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // What they used is free again only when they have ended.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn work(
    medium: &dyn MediumReader,
    todo: &Mutex<Receiver<PendingRead>>,
    tell: &Sender<Ended>,
    bell: &EventFd,
) {
    loop {
        // One thread waits for a job, the others for their turn to.
        let job = todo.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(mut read) = job else { return };
        // A panic would take the slot with it, and a read that never ends.
        let result = catch_unwind(AssertUnwindSafe(|| read.copy_all(medium)));
        let result = result.unwrap_or(Err(FastTierError::Stopped));
        if tell.send(Ended { read, result }).is_err() {
            return;
        }
        let _ = bell.write(1);
    }
}
