//! The comparison backend: the same store, with its bytes moved by glommio.
//!
//! glommio allocates the memory of every read itself, so each byte is copied once on its way into or out of a slot, and
//! nothing of the arena is registered. Its executor lives on one thread; its types do not leave this file. It opens
//! each file again through `/proc/self/fd`.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    fmt,
    future::poll_fn,
    io,
    os::{fd::RawFd, unix::fs::FileExt},
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    task::{Poll, Waker},
    time::Duration,
};

use glommio::{
    ExecutorJoinHandle, GlommioError, LocalExecutorBuilder, Placement, Task,
    io::{DmaFile, OpenOptions, ReadResult},
    spawn_local,
    timer::sleep,
};
use nix::sys::eventfd::EventFd;

use crate::nvme::{
    backend::{Backend, Ended, Sending},
    files::SegmentFile,
    segment::Page,
    transfer::{Direction, Memory, Progress, Run, Sizing, Transfer},
};

/// Its own memory, from which requests are served; beyond it glommio takes fresh pages for each request.
const IO_MEMORY_BYTES: usize = 64 << 20;
/// How long its thread may take to start, and to end.
const THREAD_WAIT: Duration = Duration::from_secs(10);

struct Work {
    transfer: Transfer,
    progress: Progress,
    requests: u64,
}

/// To the executor's thread.
enum Message {
    /// All requests of it, together.
    Read(Work),
    /// This request of it: writes pause between requests.
    Write(Work, Run),
    /// The file's last transfer has ended.
    Forget(RawFd),
}

/// From the executor's thread.
enum Answer {
    Started,
    Done(Work),
}

/// Moves bytes through a glommio executor.
pub(super) struct Glommio {
    inbox: Arc<Inbox>,
    answers: mpsc::Receiver<Answer>,
    thread: Option<ExecutorJoinHandle<()>>,
    reads: VecDeque<Work>,
    writes: VecDeque<Work>,
    in_flight: usize,
    in_flight_max: usize,
    writes_in_flight: usize,
    write_requests_max: usize,
    requests: u64,
    sizing: Sizing,
}

impl Glommio {
    /// Starts the executor.
    pub(super) fn start(
        entries: u32,
        write_requests_max: usize,
        sizing: Sizing,
        wake: &Arc<EventFd>,
    ) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let (sender, answers) = mpsc::channel();
        let (theirs, wake) = (Arc::clone(&inbox), Arc::clone(wake));
        let thread = LocalExecutorBuilder::new(Placement::Unbound)
            .name("kv-tier-glommio")
            .ring_depth(entries as usize)
            .io_memory(IO_MEMORY_BYTES)
            .spawn(move || serve(theirs, sender, wake))
            .map_err(io::Error::from)?;
        if answers.recv_timeout(THREAD_WAIT).is_err() {
            inbox.close();
            return Err(match thread.join() {
                Err(error) => error.into(),
                Ok(()) => io::Error::from_raw_os_error(libc::ETIMEDOUT),
            });
        }
        Ok(Self {
            inbox,
            answers,
            thread: Some(thread),
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            in_flight: 0,
            in_flight_max: entries as usize,
            writes_in_flight: 0,
            write_requests_max,
            requests: 0,
            sizing,
        })
    }

    fn send(&mut self, sending: Sending, ended: &mut Vec<Ended>) {
        while sending != Sending::Nothing && self.in_flight < self.in_flight_max {
            let may_write =
                sending == Sending::All && self.writes_in_flight < self.write_requests_max;
            let message = if let Some(read) = self.reads.pop_front() {
                Message::Read(read)
            } else if may_write && let Some(mut write) = self.writes.pop_front() {
                let Some(run) = write.progress.next_request() else {
                    ended.push(end(write));
                    continue;
                };
                self.writes_in_flight += 1;
                Message::Write(write, run)
            } else {
                return;
            };
            self.in_flight += 1;
            self.inbox.push(message);
        }
    }
}

fn end(work: Work) -> Ended {
    Ended { failure: work.progress.failure(), transfer: work.transfer }
}

impl Backend for Glommio {
    fn start(&mut self, mut transfer: Transfer) {
        let progress = if transfer.is_sound() {
            // Its own buffers are of small pages, whatever ours are.
            Progress::new(transfer.runs, self.sizing.request_bytes(&Memory::Zeros))
        } else {
            Progress::failed(transfer.runs, libc::EFAULT)
        };
        let queue = match transfer.direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        };
        queue.push_back(Work { transfer, progress, requests: 0 });
    }

    fn pump(&mut self, sending: Sending, ended: &mut Vec<Ended>) {
        loop {
            self.send(sending, ended);
            let Ok(answer) = self.answers.try_recv() else { return };
            let Answer::Done(mut work) = answer else { continue };
            let is_write = work.transfer.direction == Direction::Write;
            self.in_flight -= 1;
            self.writes_in_flight -= usize::from(is_write);
            self.requests += std::mem::take(&mut work.requests);
            if work.progress.is_over() {
                ended.push(end(work));
            } else {
                self.writes.push_front(work);
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

    fn add_file(&mut self, file: &mut SegmentFile) {
        // By reading the first block of the first file, glommio finds out whether the device can be polled. Where there
        // is no block the kernel does not ask the device, and glommio would believe that it can.
        let file = file.file();
        if file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            let _ = file.write_all_at(&Page::zeroed().0, 0);
        }
    }

    fn remove_file(&mut self, file: &SegmentFile) {
        self.inbox.push(Message::Forget(file.as_raw_fd()));
    }
}

impl Drop for Glommio {
    fn drop(&mut self) {
        self.inbox.close();
        let Some(thread) = self.thread.take().filter(|_| self.in_flight == 0) else {
            // What is in flight lands in glommio's memory; the thread, which owns that and the slots, is left to itself.
            return;
        };
        let ended = self.answers.recv_timeout(THREAD_WAIT).map(drop);
        if ended == Err(mpsc::RecvTimeoutError::Disconnected) {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Glommio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Glommio").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// Messages for the executor, which sleeps until one comes.
#[derive(Default)]
struct Inbox(Mutex<Messages>);

#[derive(Default)]
struct Messages {
    waiting: VecDeque<Message>,
    reader: Option<Waker>,
    closed: bool,
}

impl Inbox {
    fn push(&self, message: Message) {
        self.change(|messages| messages.waiting.push_back(message));
    }

    fn close(&self) {
        self.change(|messages| messages.closed = true);
    }

    fn change(&self, change: impl FnOnce(&mut Messages)) {
        let mut messages = self.lock();
        change(&mut messages);
        let reader = messages.reader.take();
        drop(messages);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// The next message; `None` when it is closed and empty.
    async fn next(&self) -> Option<Message> {
        poll_fn(|context| {
            let mut messages = self.lock();
            match messages.waiting.pop_front() {
                Some(message) => Poll::Ready(Some(message)),
                None if messages.closed => Poll::Ready(None),
                None => {
                    messages.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    fn lock(&self) -> MutexGuard<'_, Messages> {
        // A queue and a flag: whole even after a panic elsewhere.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The executor's main task: until the inbox is closed and everything has ended.
async fn serve(inbox: Arc<Inbox>, answers: mpsc::Sender<Answer>, wake: Arc<EventFd>) {
    let files = Rc::new(Files::default());
    let busy = Rc::new(Cell::new(0_usize));
    let answer = Rc::new(move |answer| {
        // The tier may be gone, and then nobody waits. The signal fails only if it is readable already.
        let _ = answers.send(answer);
        let _ = wake.write(1);
    });
    answer(Answer::Started);
    while let Some(message) = inbox.next().await {
        let (files, answer, still_busy) = (Rc::clone(&files), Rc::clone(&answer), Rc::clone(&busy));
        busy.set(busy.get() + 1);
        spawn_local(async move {
            match message {
                Message::Read(work) => answer(Answer::Done(read(&files, work).await)),
                Message::Write(work, run) => answer(Answer::Done(write(&files, work, run).await)),
                Message::Forget(fd) => files.forget(fd).await,
            }
            still_busy.set(still_busy.get() - 1);
        })
        .detach();
    }
    while busy.get() > 0 {
        sleep(Duration::from_millis(1)).await;
    }
}

/// The tier's files, opened again by glommio, by the tier's descriptor.
#[derive(Default)]
struct Files(RefCell<HashMap<RawFd, Rc<DmaFile>>>);

impl Files {
    async fn get(&self, fd: RawFd) -> Result<Rc<DmaFile>, i32> {
        let known = self.0.borrow().get(&fd).cloned();
        if let Some(file) = known {
            return Ok(file);
        }
        let path = format!("/proc/self/fd/{fd}");
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).dma_open(path).await;
        let file = Rc::new(opened.map_err(|error| errno(&error))?);
        // Another request may have opened it meanwhile.
        Ok(Rc::clone(self.0.borrow_mut().entry(fd).or_insert(file)))
    }

    async fn forget(&self, fd: RawFd) {
        let file = self.0.borrow_mut().remove(&fd);
        if let Some(file) = file {
            let _ = file.close_rc().await;
        }
    }
}

/// Sends the requests of a read together and copies what they bring, until nothing is left.
async fn read(files: &Files, mut work: Work) -> Work {
    let file = files.get(work.transfer.file.as_raw_fd()).await;
    while !work.progress.is_over() {
        let mut sent: Vec<(Run, Task<Result<ReadResult, i32>>)> = Vec::new();
        while let Some(run) = work.progress.next_request() {
            let file = file.clone();
            let request = async move {
                let read = file?.read_at_aligned(run.file_offset, run.bytes).await;
                read.map_err(|error| errno(&error))
            };
            sent.push((run, spawn_local(request)));
        }
        work.requests += sent.len() as u64;
        for (run, request) in sent {
            let result = match request.await {
                Ok(bytes) => copy_in(&mut work.transfer.memory, run, &bytes),
                Err(errno) => -errno,
            };
            work.progress.complete(run, result);
        }
    }
    work
}

/// Bytes copied, or a negative error number.
fn copy_in(memory: &mut Memory, run: Run, bytes: &[u8]) -> i32 {
    let moved = bytes.len().min(run.bytes);
    let range = run.memory_offset..run.memory_offset + moved;
    match memory.bytes_mut().and_then(|all| all.get_mut(range)) {
        Some(slot) => {
            slot.copy_from_slice(&bytes[..moved]);
            i32::try_from(moved).unwrap_or(i32::MAX)
        }
        None => -libc::EFAULT,
    }
}

/// Sends one request of a write.
async fn write(files: &Files, mut work: Work, run: Run) -> Work {
    work.requests += 1;
    let result = match write_run(files, &work.transfer, run).await {
        Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
        Err(errno) => -errno,
    };
    work.progress.complete(run, result);
    work
}

async fn write_run(files: &Files, transfer: &Transfer, run: Run) -> Result<usize, i32> {
    let file = files.get(transfer.file.as_raw_fd()).await?;
    let range = run.memory_offset..run.memory_offset + run.bytes;
    let bytes = transfer.memory.bytes().get(range).ok_or(libc::EFAULT)?;
    let mut buffer = file.alloc_dma_buffer(run.bytes);
    buffer.as_bytes_mut().get_mut(..run.bytes).ok_or(libc::EFAULT)?.copy_from_slice(bytes);
    file.write_at(buffer, run.file_offset).await.map_err(|error| errno(&error))
}

fn errno(error: &GlommioError<()>) -> i32 {
    error.raw_os_error().filter(|errno| *errno > 0).unwrap_or(libc::EIO)
}
