//! What moves bytes: io_uring, or a pool of threads where the system denies it.

use std::{fmt, mem::ManuallyDrop, os::fd::AsFd, time::Duration};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};

use crate::nvme::{
    files::SegmentFile,
    transfer::{Failure, Transfer},
};

const SLICE: Duration = Duration::from_millis(10);

/// Which requests may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    All,
    ReadsOnly,
    Nothing,
}

/// A transfer that ended; the kernel is done with it.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) transfer: Transfer,
    pub(super) failure: Option<Failure>,
}

/// Moves bytes. It owns a transfer from `start` until it comes back from `pump`; dropping a backend with requests in
/// flight leaks what they use.
pub(super) trait Backend: fmt::Debug + Send {
    /// Queues a transfer; never blocks.
    fn start(&mut self, transfer: Transfer);

    /// Sends what may be sent, and appends what ended; never blocks on the device.
    fn pump(&mut self, sending: Sending, ended: &mut Vec<Ended>);

    /// Requests in the kernel.
    fn in_flight(&self) -> usize;

    /// True if the kernel took no requests at the last `pump`: ask again later, nothing will wake.
    fn was_refused(&self) -> bool;

    /// Requests sent since the start.
    fn requests(&self) -> u64;

    /// Registers a file with the kernel, if that is done.
    fn add_file(&mut self, file: &mut SegmentFile);

    /// The last transfer of this file has ended.
    fn remove_file(&mut self, file: &SegmentFile);
}

/// Waits until `wake` is readable or `limit` has passed; then makes it silent again.
pub(super) fn wait(wake: &EventFd, limit: Duration) {
    let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    let _ = poll(&mut [PollFd::new(wake.as_fd(), PollFlags::POLLIN)], timeout);
    silence(wake);
}

/// Consumes what was signalled (the descriptor does not block).
pub(super) fn silence(wake: &EventFd) {
    let _ = wake.read();
}

/// Sends nothing more and reaps what is in flight, for at most about `limit`; drops the backend.
///
/// No clock is read: the wait is cut into slices, and only slices without a completion count.
pub(super) fn drain(mut backend: Box<dyn Backend>, wake: &EventFd, limit: Duration) {
    let mut slices = limit.as_millis() / SLICE.as_millis();
    let mut ended = Vec::new();
    loop {
        let before = backend.in_flight();
        backend.pump(Sending::Nothing, &mut ended);
        ended.clear();
        if backend.in_flight() == 0 {
            return;
        }
        if backend.in_flight() == before {
            let Some(rest) = slices.checked_sub(1) else { break };
            slices = rest;
        }
        wait(wake, SLICE);
    }
    tracing::warn!(requests = backend.in_flight(), "requests did not end: their memory is leaked");
}

/// Touches nothing of it, in a forked child.
pub(super) fn abandon(backend: Box<dyn Backend>) {
    let _leaked = ManuallyDrop::new(backend);
}
