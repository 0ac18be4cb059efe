//! Waiting for the bell, the tier or a time, to the microsecond.

use std::{
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::EventFd,
        timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
};

use crate::EngineError;

/// A timer beside the file descriptors: `poll` alone counts in milliseconds, a paced tier in microseconds.
#[derive(Debug)]
pub(super) struct Sleeper {
    timer: TimerFd,
}

impl Sleeper {
    pub(super) fn new() -> Result<Self, EngineError> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)
            .map(|timer| Self { timer })
            .map_err(|errno| EngineError::system("a timerfd", errno))
    }

    /// Returns at `until_ns`, or when the bell or the tier calls; also early, as after a signal.
    pub(super) fn sleep(
        &mut self,
        now_ns: u64,
        until_ns: u64,
        bell: &EventFd,
        tier: Option<BorrowedFd<'_>>,
    ) {
        let wait = Duration::from_nanos(until_ns.saturating_sub(now_ns));
        if wait.is_zero() {
            return;
        }
        let expiration = Expiration::OneShot(wait.into());
        if self.timer.set(expiration, TimerSetTimeFlags::empty()).is_err() {
            std::thread::sleep(wait.min(Duration::from_millis(1)));
            return;
        }
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![readable(self.timer.as_fd()), readable(bell.as_fd())];
        fds.extend(tier.map(readable));
        // A second bound, should the timer fail: whatever poll says, the caller looks at everything.
        let bound = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut fds, bound_above(bound));
        if fds[1].any() == Some(true) {
            let _ = bell.read();
        }
    }
}

/// A millisecond more than asked, so that the timer comes first.
fn bound_above(bound: PollTimeout) -> PollTimeout {
    let ms = bound.as_millis().unwrap_or(u32::MAX).saturating_add(1);
    PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
}
