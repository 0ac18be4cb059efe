//! Ctrl-C: the measurement ends, and what was set up is taken down again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use anyhow::{Context, Result};
use nix::{
    sys::{
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::Pid,
};

/// Counts SIGINT and SIGTERM, which no longer end this process.
pub(in crate::bench) struct Signals {
    /// Raised by the listener, read by who waits; nothing else is published with it.
    count: Arc<AtomicU32>,
}

impl Signals {
    /// Begins to listen. Threads and children that are started later have the signals blocked.
    ///
    /// # Errors
    /// If the system refuses.
    pub(in crate::bench) fn listen() -> Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGINT);
        set.add(Signal::SIGTERM);
        let descriptor = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC).context("signalfd")?;
        set.thread_block().context("block signals")?;
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        thread::spawn(move || {
            while let Ok(Some(_)) = descriptor.read_signal() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Ok(Self { count })
    }

    pub(in crate::bench) fn arrived(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    pub(in crate::bench) fn arrived_again(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 1
    }
}

/// Asks a process to end.
pub(in crate::bench) fn terminate(process: u32) {
    if let Ok(process) = i32::try_from(process) {
        // It may have ended already.
        let _ = kill(Pid::from_raw(process), Signal::SIGTERM);
    }
}
