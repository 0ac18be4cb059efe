//! The progress bar, and ctrl-C: the run ends after its step and tidies up.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use indicatif::{ProgressBar, ProgressStyle};
use kv_connector::replay::Watch;
use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

/// Shows progress on a terminal and listens for SIGINT and SIGTERM.
pub(crate) struct Bar {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

impl Bar {
    /// Call before any other thread starts: threads inherit which signals are blocked.
    pub(crate) fn new(steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        let style = ProgressStyle::with_template("{bar:40} {percent:>3} % {elapsed} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, stop: listen() }
    }

    /// How many steps there are, if that was not known before.
    pub(crate) fn set_steps(&self, steps: u64) {
        self.bar.set_length(steps);
    }

    /// Whether a signal asked for the end.
    pub(crate) fn is_stopped(&self) -> bool {
        // Set once by the listener, read here; nothing else is published with it.
        self.stop.load(Ordering::Relaxed)
    }

    /// Removes the bar.
    pub(crate) fn done(&self) {
        self.bar.finish_and_clear();
    }
}

impl Watch for Bar {
    fn phase(&self, name: &str) {
        self.bar.set_message(name.to_owned());
    }

    fn step(&self) -> bool {
        self.bar.inc(1);
        !self.is_stopped()
    }
}

/// A flag that the first signal sets; the second ends the process at once.
fn listen() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    let Ok(descriptor) = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC) else { return stop };
    // Without blocking, signals do what they always do: end the process, untidily.
    if signals.thread_block().is_err() {
        return stop;
    }
    let flag = Arc::clone(&stop);
    let listener = move || {
        while let Ok(Some(signal)) = descriptor.read_signal() {
            if flag.swap(true, Ordering::Relaxed) {
                process::exit(128 + i32::try_from(signal.ssi_signo).unwrap_or(0));
            }
        }
    };
    let named = thread::Builder::new().name("signals".to_owned()).spawn(listener);
    if named.is_err() {
        let _ = signals.thread_unblock();
    }
    stop
}
