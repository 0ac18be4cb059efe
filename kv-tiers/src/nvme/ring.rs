//! The io_uring backend. The only unsafe code of the driver.
//!
//! The ring owns memory and file of a transfer from the push of its first request to the completion of its last.
//! Closing a ring does not wait for requests, so what is still in flight when the ring is dropped is leaked.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::{AsRawFd, RawFd},
    ptr,
    sync::Arc,
};

use io_uring::{IoUring, opcode, squeue, types};
use nix::sys::eventfd::EventFd;

use crate::{
    Arena,
    nvme::{
        backend::{Backend, Ended, Sending},
        files::SegmentFile,
        transfer::{Direction, Memory, Progress, Run, Sizing, Transfer},
    },
};

/// Bytes of one registered buffer at most (a limit of the kernel).
const BUFFER_BYTES_MAX: usize = 1 << 30;
/// Files registered at most; further ones work unregistered.
const FILES_MAX: u32 = 512;

/// What a ring shall be.
#[derive(Clone, Debug)]
pub(super) struct RingOptions {
    pub(super) entries: u32,
    pub(super) write_requests_max: usize,
    pub(super) register_buffers: bool,
    pub(super) register_files: bool,
    pub(super) sizing: Sizing,
}

/// Slots of one arena as the kernel knows them: several buffers, each of whole slots.
#[derive(Debug)]
struct Registered {
    /// Kept alive as long as the registration.
    arena: Arc<Arena>,
    slots_per_buffer: usize,
    first_buffer: usize,
}

/// A transfer the ring owns.
#[derive(Debug)]
struct Active {
    transfer: Transfer,
    progress: Progress,
    /// Exposed address of the memory.
    address: usize,
    /// Registered buffer it lies in.
    buffer: Option<u16>,
}

/// A request between push and completion.
#[derive(Debug)]
struct Request {
    key: u64,
    run: Run,
    direction: Direction,
}

pub(super) struct Ring {
    ring: IoUring,
    active: HashMap<u64, Active>,
    reads: VecDeque<u64>,
    writes: VecDeque<u64>,
    /// Nothing to send: they end at the next pump.
    over_at_start: Vec<u64>,
    requests: Vec<Option<Request>>,
    vacant: Vec<usize>,
    writes_in_flight: usize,
    unsubmitted: usize,
    refused: bool,
    sent: u64,
    buffers: Vec<Registered>,
    free_files: Option<Vec<u32>>,
    options: RingOptions,
    _wake: Arc<EventFd>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("active", &self.active.len())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring that signals completions on `wake`. Refused registrations are told through `refused`, not errors.
    pub(super) fn new(
        options: RingOptions,
        arenas: &[Arc<Arena>],
        wake: Arc<EventFd>,
        refused: &mut Vec<(&'static str, io::Error)>,
    ) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().setup_clamp().build(options.entries)?;
        ring.submitter().register_eventfd(wake.as_raw_fd())?;
        let entries = ring.params().sq_entries() as usize;
        let mut this = Self {
            ring,
            active: HashMap::new(),
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            over_at_start: Vec::new(),
            requests: (0..entries).map(|_| None).collect(),
            vacant: (0..entries).rev().collect(),
            writes_in_flight: 0,
            unsubmitted: 0,
            refused: false,
            sent: 0,
            buffers: Vec::new(),
            free_files: None,
            options,
            _wake: wake,
        };
        if this.options.register_buffers
            && let Err(error) = this.register_buffers(arenas)
        {
            refused.push(("registered buffers", error));
        }
        if this.options.register_files {
            match this.ring.submitter().register_files_sparse(FILES_MAX) {
                Ok(()) => this.free_files = Some((0..FILES_MAX).rev().collect()),
                Err(error) => refused.push(("registered files", error)),
            }
        }
        Ok(this)
    }

    pub(super) fn has_registered_buffers(&self) -> bool {
        !self.buffers.is_empty()
    }

    pub(super) fn has_registered_files(&self) -> bool {
        self.free_files.is_some()
    }

    fn register_buffers(&mut self, arenas: &[Arc<Arena>]) -> io::Result<()> {
        let mut vectors = Vec::new();
        let mut registered: Vec<Registered> = Vec::new();
        for arena in arenas {
            let slots_per_buffer = BUFFER_BYTES_MAX / arena.slot_bytes();
            let known = registered.iter().any(|other| Arc::ptr_eq(&other.arena, arena));
            if slots_per_buffer == 0 || known {
                continue;
            }
            let (base, bytes) = arena.region();
            let buffer_bytes = slots_per_buffer * arena.slot_bytes();
            registered.push(Registered {
                arena: Arc::clone(arena),
                slots_per_buffer,
                first_buffer: vectors.len(),
            });
            for start in (0..bytes).step_by(buffer_bytes) {
                vectors.push(libc::iovec {
                    iov_base: base.wrapping_add(start).cast_mut().cast(),
                    iov_len: buffer_bytes.min(bytes - start),
                });
            }
        }
        if vectors.is_empty() {
            return Ok(());
        }
        // SAFETY: the vectors describe the mappings of arenas, which `self.buffers` keeps alive until after the ring.
        unsafe { self.ring.submitter().register_buffers(&vectors) }?;
        self.buffers = registered;
        Ok(())
    }

    /// The registered buffer that holds this memory.
    fn buffer_of(&self, memory: &Memory) -> Option<u16> {
        let slot = memory.slot()?;
        let registered =
            self.buffers.iter().find(|known| Arc::ptr_eq(&known.arena, slot.arena()))?;
        let buffer = registered.first_buffer + slot.index() as usize / registered.slots_per_buffer;
        u16::try_from(buffer).ok()
    }

    fn end(&mut self, key: u64, ended: &mut Vec<Ended>) {
        if let Some(active) = self.active.remove(&key) {
            ended.push(Ended { failure: active.progress.failure(), transfer: active.transfer });
        }
    }

    /// The next transfer to send a request of: reads first.
    fn next_key(&mut self, sending: Sending) -> Option<(u64, Direction)> {
        let write_room = self.writes_in_flight < self.options.write_requests_max;
        let lanes = match sending {
            Sending::Nothing => return None,
            Sending::ReadsOnly => [Some(Direction::Read), None],
            Sending::All => [Some(Direction::Read), write_room.then_some(Direction::Write)],
        };
        for direction in lanes.into_iter().flatten() {
            let lane = match direction {
                Direction::Read => &mut self.reads,
                Direction::Write => &mut self.writes,
            };
            while let Some(&key) = lane.front() {
                match self.active.get(&key) {
                    Some(active) if active.progress.wants_more() => return Some((key, direction)),
                    _ => lane.pop_front(),
                };
            }
        }
        None
    }

    fn push_requests(&mut self, sending: Sending) {
        while let Some(&place) = self.vacant.last()
            && let Some((key, direction)) = self.next_key(sending)
            && let Some(active) = self.active.get_mut(&key)
            && let Some(run) = active.progress.next_request()
        {
            let entry = entry(active, run).user_data(place as u64);
            // SAFETY: the entry's memory and file belong to `active`, which stays in `self.active`, or is leaked, until
            // its progress is idle, that is, until the completion of this request; `is_sound` checked the range.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                active.progress.unsend(run);
                break;
            }
            self.vacant.pop();
            self.requests[place] = Some(Request { key, run, direction });
            self.writes_in_flight += usize::from(direction == Direction::Write);
            self.unsubmitted += 1;
            self.sent += 1;
        }
    }

    fn submit(&mut self) {
        self.refused = false;
        while self.unsubmitted > 0 {
            match self.ring.submit() {
                Ok(0) => break,
                Ok(count) => self.unsubmitted = self.unsubmitted.saturating_sub(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::debug!(%error, "io_uring_enter refused");
                    break;
                }
            }
        }
        self.refused = self.unsubmitted > 0;
    }

    /// Takes the completions that are there; returns how many.
    fn reap(&mut self, ended: &mut Vec<Ended>) -> usize {
        let mut count = 0;
        loop {
            let Some(completion) = self.ring.completion().next() else { return count };
            count += 1;
            let place = usize::try_from(completion.user_data()).unwrap_or(usize::MAX);
            let Some(request) = self.requests.get_mut(place).and_then(Option::take) else {
                tracing::error!(place, "a completion of nothing that was sent");
                continue;
            };
            self.vacant.push(place);
            let is_write = request.direction == Direction::Write;
            self.writes_in_flight -= usize::from(is_write);
            let Some(active) = self.active.get_mut(&request.key) else { continue };
            active.progress.complete(request.run, completion.result());
            if active.progress.is_over() {
                self.end(request.key, ended);
            } else if active.progress.wants_more() {
                let lane = if is_write { &mut self.writes } else { &mut self.reads };
                if lane.front() != Some(&request.key) {
                    lane.push_front(request.key);
                }
            }
        }
    }
}

/// The submission entry of one request.
fn entry(active: &Active, run: Run) -> squeue::Entry {
    let address = active.address + run.memory_offset;
    let from: *const u8 = ptr::with_exposed_provenance(address);
    let into: *mut u8 = ptr::with_exposed_provenance_mut(address);
    let length = u32::try_from(run.bytes).expect("requests are at most 1 GiB");
    macro_rules! on {
        ($fd:expr) => {
            match (active.transfer.direction, active.buffer) {
                (Direction::Read, None) => {
                    opcode::Read::new($fd, into, length).offset(run.file_offset).build()
                }
                (Direction::Read, Some(buffer)) => {
                    opcode::ReadFixed::new($fd, into, length, buffer)
                        .offset(run.file_offset)
                        .build()
                }
                (Direction::Write, None) => {
                    opcode::Write::new($fd, from, length).offset(run.file_offset).build()
                }
                (Direction::Write, Some(buffer)) => {
                    opcode::WriteFixed::new($fd, from, length, buffer)
                        .offset(run.file_offset)
                        .build()
                }
            }
        };
    }
    match active.transfer.file.registered() {
        Some(index) => on!(types::Fixed(index)),
        None => on!(types::Fd(active.transfer.file.as_raw_fd())),
    }
}

impl Backend for Ring {
    fn start(&mut self, mut transfer: Transfer) {
        let key = transfer.key;
        let sound = transfer.is_sound();
        let address = match transfer.memory.bytes_mut() {
            Some(bytes) => bytes.as_mut_ptr().expose_provenance(),
            None => transfer.memory.bytes().as_ptr().expose_provenance(),
        };
        let progress = if sound {
            Progress::new(transfer.runs, self.options.sizing.request_bytes(&transfer.memory))
        } else {
            Progress::failed(transfer.runs, libc::EFAULT)
        };
        let buffer = self.buffer_of(&transfer.memory);
        if progress.is_over() {
            self.over_at_start.push(key);
        }
        match transfer.direction {
            Direction::Read => self.reads.push_back(key),
            Direction::Write => self.writes.push_back(key),
        }
        self.active.insert(key, Active { transfer, progress, address, buffer });
    }

    fn pump(&mut self, sending: Sending, ended: &mut Vec<Ended>) {
        loop {
            self.push_requests(sending);
            self.submit();
            if self.reap(ended) == 0 {
                break;
            }
        }
        while let Some(key) = self.over_at_start.pop() {
            self.end(key, ended);
        }
    }

    fn in_flight(&self) -> usize {
        self.requests.len() - self.vacant.len()
    }

    fn was_refused(&self) -> bool {
        self.refused
    }

    fn requests(&self) -> u64 {
        self.sent
    }

    fn add_file(&mut self, file: &mut SegmentFile) {
        let Some(index) = self.free_files.as_mut().and_then(Vec::pop) else { return };
        if self.update_file(index, file.as_raw_fd()) {
            file.set_registered(index);
        }
    }

    fn remove_file(&mut self, file: &SegmentFile) {
        let Some(index) = file.registered() else { return };
        if self.update_file(index, -1)
            && let Some(free) = &mut self.free_files
        {
            free.push(index);
        }
    }
}

impl Ring {
    fn update_file(&self, index: u32, descriptor: RawFd) -> bool {
        self.ring.submitter().register_files_update(index, &[descriptor]).is_ok()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for (_, active) in self.active.drain() {
            if !active.progress.is_idle() {
                active.transfer.leak();
            }
        }
    }
}
