//! The backend where io_uring is denied: a small pool of threads that read and write.
//!
//! A request moves its whole transfer, memory and file, into a thread and back, so nothing is shared.

use std::{
    collections::VecDeque,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use nix::sys::eventfd::EventFd;

use crate::nvme::{
    backend::{Backend, Ended, Sending},
    files::SegmentFile,
    transfer::{Direction, Progress, Run, Sizing, Transfer},
};

#[derive(Debug)]
struct Work {
    transfer: Transfer,
    progress: Progress,
}

/// Threads that take one request at a time.
#[derive(Debug)]
pub(super) struct Threads {
    /// `None` only while dropping.
    work: Option<mpsc::Sender<(Work, Run)>>,
    done: mpsc::Receiver<(Work, Run, i32)>,
    pool: Vec<thread::JoinHandle<()>>,
    reads: VecDeque<Work>,
    writes: VecDeque<Work>,
    in_flight: usize,
    writes_in_flight: usize,
    write_requests_max: usize,
    requests: u64,
    sizing: Sizing,
}

impl Threads {
    /// Starts `threads` threads that signal completions on `wake`.
    pub(super) fn new(
        threads: u32,
        write_requests_max: usize,
        sizing: Sizing,
        wake: &Arc<EventFd>,
    ) -> io::Result<Self> {
        let (work, receiver) = mpsc::channel();
        let (sender, done) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let pool = (0..threads)
            .map(|_| {
                let (receiver, sender, wake) =
                    (Arc::clone(&receiver), sender.clone(), Arc::clone(wake));
                thread::Builder::new()
                    .name("kv-tier-io".to_owned())
                    .spawn(move || serve(&receiver, &sender, &wake))
            })
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            work: Some(work),
            done,
            pool,
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            in_flight: 0,
            writes_in_flight: 0,
            write_requests_max,
            requests: 0,
            sizing,
        })
    }

    fn next_work(&mut self, sending: Sending) -> Option<Work> {
        if sending == Sending::Nothing || self.in_flight >= self.pool.len() {
            return None;
        }
        if let Some(read) = self.reads.pop_front() {
            return Some(read);
        }
        let may_write = sending == Sending::All && self.writes_in_flight < self.write_requests_max;
        if may_write { self.writes.pop_front() } else { None }
    }

    fn send(&mut self, sending: Sending, ended: &mut Vec<Ended>) {
        while let Some(mut work) = self.next_work(sending) {
            let Some(run) = work.progress.next_request() else {
                ended.push(end(work));
                continue;
            };
            let is_write = work.transfer.direction == Direction::Write;
            let Some(pool) = &self.work else { return };
            match pool.send((work, run)) {
                Ok(()) => {
                    self.in_flight += 1;
                    self.writes_in_flight += usize::from(is_write);
                    self.requests += 1;
                }
                // No thread is left: the request did not happen.
                Err(mpsc::SendError((mut work, run))) => {
                    work.progress.complete(run, -libc::EIO);
                    ended.push(end(work));
                }
            }
        }
    }
}

fn end(work: Work) -> Ended {
    Ended { failure: work.progress.failure(), transfer: work.transfer }
}

/// One thread: until the tier drops its end of the queue.
fn serve(
    queue: &Mutex<mpsc::Receiver<(Work, Run)>>,
    done: &mpsc::Sender<(Work, Run, i32)>,
    wake: &EventFd,
) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((mut work, run)) = next else { return };
        let result = move_bytes(&mut work.transfer, run);
        if done.send((work, run, result)).is_err() {
            return;
        }
        // It fails only if the counter is full, and then it is readable.
        let _ = wake.write(1);
    }
}

/// Bytes moved by one system call, or a negative error number.
fn move_bytes(transfer: &mut Transfer, run: Run) -> i32 {
    let range = run.memory_offset..run.memory_offset + run.bytes;
    let result = match transfer.direction {
        Direction::Read => {
            let Some(bytes) = transfer.memory.bytes_mut().and_then(|all| all.get_mut(range)) else {
                return -libc::EFAULT;
            };
            transfer.file.file().read_at(bytes, run.file_offset)
        }
        Direction::Write => {
            let Some(bytes) = transfer.memory.bytes().get(range) else { return -libc::EFAULT };
            transfer.file.file().write_at(bytes, run.file_offset)
        }
    };
    match result {
        Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

impl Backend for Threads {
    fn start(&mut self, mut transfer: Transfer) {
        let sound = transfer.is_sound();
        let progress = if sound {
            Progress::new(transfer.runs, self.sizing.request_bytes(&transfer.memory))
        } else {
            Progress::failed(transfer.runs, libc::EFAULT)
        };
        match transfer.direction {
            Direction::Read => self.reads.push_back(Work { transfer, progress }),
            Direction::Write => self.writes.push_back(Work { transfer, progress }),
        }
    }

    fn pump(&mut self, sending: Sending, ended: &mut Vec<Ended>) {
        loop {
            self.send(sending, ended);
            let Ok((mut work, run, result)) = self.done.try_recv() else { return };
            let is_write = work.transfer.direction == Direction::Write;
            self.in_flight -= 1;
            self.writes_in_flight -= usize::from(is_write);
            work.progress.complete(run, result);
            if work.progress.is_over() {
                ended.push(end(work));
            } else if is_write {
                self.writes.push_front(work);
            } else {
                self.reads.push_front(work);
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn was_refused(&self) -> bool {
        false
    }

    fn requests(&self) -> u64 {
        self.requests
    }

    fn add_file(&mut self, _file: &mut SegmentFile) {}

    fn remove_file(&mut self, _file: &SegmentFile) {}
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.work = None;
        // A thread inside a system call keeps what it uses, frees it after the call, and ends; waiting for it has no
        // bound, so only idle threads are joined.
        if self.in_flight == 0 {
            for thread in self.pool.drain(..) {
                let _ = thread.join();
            }
        }
    }
}
