//! What the engine's callers share with one tier's thread: an inbox, a bell, and counters.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use kv_chunk::Digest;
use kv_router::{KneeConfig, TierId};
use kv_tiers::{ErrorKind, TierError, TierStats};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{
    EngineError, TierConfig, TierStatus, WindowSearch, clock::seconds, inspect::Errand,
    shared::Inquiry, step::StepHandle, sync::lock_plain,
};

/// How long a reader of statistics waits for fresh ones before it takes the last.
const SNAPSHOT_WAIT: Duration = Duration::from_millis(100);

/// One tier as everybody but its thread sees it.
#[derive(Debug)]
pub(crate) struct TierHandle {
    pub(crate) id: TierId,
    pub(crate) name: String,
    pub(crate) windows: KneeConfig,
    /// Reads in flight that the tier does best with, as far as known. Written by its thread, read by planners: relaxed, a
    /// step is planned right with any.
    window: AtomicU32,
    pub(crate) write_window: u32,
    pub(crate) alone_bytes_per_s: Option<u64>,
    /// Others write into it: a chunk that is not known can be there.
    pub(crate) is_shared: bool,
    inbox: Mutex<Inbox>,
    bell: EventFd,
    /// The bell was rung and not heard. Swapped by ringers, cleared by the thread before it looks at its work: AcqRel,
    /// so that who finds it set knows that the thread will still look.
    rung: AtomicBool,
    /// Reads may be planned. Written by the thread (Release), read by planners (Acquire); behind reality it costs a
    /// failed read at most.
    readable: AtomicBool,
    pub(crate) counters: TierCounters,
    snapshot: Mutex<Snapshot>,
    snapshot_taken: Condvar,
}

/// What the thread finds when it looks.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) steps: Vec<StepHandle>,
    pub(crate) inquiries: Vec<Inquiry>,
    /// Close, and be done by then.
    pub(crate) close_by_ns: Option<u64>,
    pub(crate) snapshot_wanted: bool,
    pub(crate) errand: Option<Arc<Errand>>,
    /// Chunks that left the directory by request.
    pub(crate) removals: Vec<Digest>,
    /// The thread has ended: nothing is taken any more.
    gone: bool,
}

/// Since open. Written by the tier's thread, read for reports: relaxed, since they decide nothing but the order in
/// which tiers are preferred.
#[derive(Debug, Default)]
pub(crate) struct TierCounters {
    pub(crate) payload_bytes: AtomicU64,
    pub(crate) late_bytes: AtomicU64,
    pub(crate) lost_chunks: AtomicU64,
    pub(crate) corrupt_reads: AtomicU64,
    pub(crate) timed_out_reads: AtomicU64,
    pub(crate) busy_ns: AtomicU64,
    pub(crate) purged_chunks: AtomicU64,
    pub(crate) scrubbed_chunks: AtomicU64,
    pub(crate) scrubbed_bytes: AtomicU64,
    pub(crate) scrub_passes: AtomicU64,
    pub(crate) scrub_damaged: AtomicU64,
    /// Failed operations, such as `read_io` or `write_no_space`.
    errors: Mutex<BTreeMap<String, u64>>,
    /// Live rate; 0 until known.
    pub(crate) bytes_per_s: AtomicU64,
}

impl TierCounters {
    pub(crate) fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn count_error(&self, operation: &str, error: &TierError) {
        let kind = match error.kind() {
            ErrorKind::NotFound => "not_found",
            ErrorKind::AlreadyHeld => "already_held",
            ErrorKind::Short => "short",
            ErrorKind::NoSpace => "no_space",
            ErrorKind::Closed => "closed",
            _ => "io",
        };
        *lock_plain(&self.errors).entry(format!("{operation}_{kind}")).or_default() += 1;
    }
}

/// What only the thread can ask its tier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) stats: TierStats,
    pub(crate) breaker: &'static str,
    pub(crate) writes_paused: bool,
    pub(crate) window_search: WindowSearch,
    pub(crate) taken: u64,
}

impl TierHandle {
    pub(crate) fn new(
        id: TierId,
        config: &TierConfig,
        windows: KneeConfig,
        is_shared: bool,
    ) -> Result<Self, EngineError> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| EngineError::system("an eventfd", errno))?;
        Ok(Self {
            id,
            name: config.name.clone(),
            windows,
            window: AtomicU32::new(windows.start),
            write_window: config.write_window,
            alone_bytes_per_s: config.alone_bytes_per_s.map(|rate| rate.0),
            is_shared,
            inbox: Mutex::default(),
            bell,
            rung: AtomicBool::new(false),
            readable: AtomicBool::new(true),
            counters: TierCounters::default(),
            snapshot: Mutex::default(),
            snapshot_taken: Condvar::new(),
        })
    }

    pub(crate) fn bell(&self) -> &EventFd {
        &self.bell
    }

    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is full, and then the bell rings already.
            let _ = self.bell.write(1);
        }
    }

    /// Queues a step; if the thread has ended, withdraws the tier from it.
    pub(crate) fn push_step(&self, step: &StepHandle) {
        let mut inbox = lock_plain(&self.inbox);
        if inbox.gone {
            drop(inbox);
            step.0.mask_tier(self.id);
            return;
        }
        inbox.steps.push(step.clone());
        drop(inbox);
        self.ring();
    }

    /// Queues a look-up; if the thread has ended, it is answered at once.
    pub(crate) fn push_inquiry(&self, inquiry: Inquiry) {
        let mut inbox = lock_plain(&self.inbox);
        if inbox.gone {
            return;
        }
        inbox.inquiries.push(inquiry);
        drop(inbox);
        self.ring();
    }

    pub(crate) fn ask_to_close(&self, by_ns: u64) {
        lock_plain(&self.inbox).close_by_ns = Some(by_ns);
        self.ring();
    }

    /// Gives the thread a purge to do; false if the thread has ended.
    pub(crate) fn push_errand(&self, errand: &Arc<Errand>) -> bool {
        let mut inbox = lock_plain(&self.inbox);
        if inbox.gone {
            return false;
        }
        inbox.errand = Some(Arc::clone(errand));
        drop(inbox);
        self.ring();
        true
    }

    /// Has the thread remove a chunk that the directory no longer names for this tier.
    pub(crate) fn push_removal(&self, digest: Digest) {
        let mut inbox = lock_plain(&self.inbox);
        if !inbox.gone {
            inbox.removals.push(digest);
            drop(inbox);
            self.ring();
        }
    }

    /// Called by the thread: everything that came in since.
    pub(crate) fn take_inbox(&self) -> Inbox {
        self.rung.swap(false, Ordering::AcqRel);
        let mut inbox = lock_plain(&self.inbox);
        let (close_by_ns, gone) = (inbox.close_by_ns, inbox.gone);
        std::mem::replace(&mut *inbox, Inbox { close_by_ns, gone, ..Inbox::default() })
    }

    /// Called when the thread ends: no step is taken any more. Gives back those not looked at.
    pub(crate) fn shut_inbox(&self) -> Vec<StepHandle> {
        self.set_readable(false);
        let mut inbox = lock_plain(&self.inbox);
        inbox.gone = true;
        inbox.inquiries.clear();
        std::mem::take(&mut inbox.steps)
    }

    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Acquire)
    }

    pub(crate) fn set_readable(&self, readable: bool) {
        self.readable.store(readable, Ordering::Release);
    }

    pub(crate) fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    pub(crate) fn set_window(&self, window: u32) {
        self.window.store(window, Ordering::Relaxed);
    }

    pub(crate) fn put_snapshot(&self, snapshot: Snapshot) {
        let mut place = lock_plain(&self.snapshot);
        let taken = place.taken + 1;
        *place = Snapshot { taken, ..snapshot };
        self.snapshot_taken.notify_all();
    }

    /// The tier as of now, or as of lately if its thread is busy or gone.
    pub(crate) fn status(&self) -> TierStatus {
        let mut inbox = lock_plain(&self.inbox);
        inbox.snapshot_wanted = !inbox.gone;
        let asked = inbox.snapshot_wanted;
        let snapshot = lock_plain(&self.snapshot);
        drop(inbox);
        let before = snapshot.taken;
        let snapshot = if asked {
            self.ring();
            let waiting = |snapshot: &mut Snapshot| snapshot.taken == before;
            let waited = self.snapshot_taken.wait_timeout_while(snapshot, SNAPSHOT_WAIT, waiting);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            snapshot
        };
        self.render(&snapshot)
    }

    fn render(&self, snapshot: &Snapshot) -> TierStatus {
        let Snapshot { stats, breaker, writes_paused, window_search, .. } = snapshot;
        let counter = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TierStatus {
            name: self.name.clone(),
            window: self.window(),
            breaker: (*breaker).to_owned(),
            writes_paused: *writes_paused,
            used_bytes: stats.used_bytes,
            capacity_bytes: stats.capacity_bytes,
            chunks: stats.chunks,
            recovered_chunks: stats.recovered_chunks,
            hits: 0,
            payload_bytes: counter(&self.counters.payload_bytes),
            late_bytes: counter(&self.counters.late_bytes),
            read_bytes: stats.read_bytes,
            write_bytes: stats.write_bytes,
            device_requests: stats.device_requests,
            evictions: stats.evictions,
            purged_chunks: counter(&self.counters.purged_chunks),
            scrubbed_chunks: counter(&self.counters.scrubbed_chunks),
            scrubbed_bytes: counter(&self.counters.scrubbed_bytes),
            scrub_passes: counter(&self.counters.scrub_passes),
            scrub_damaged: counter(&self.counters.scrub_damaged),
            lost_chunks: counter(&self.counters.lost_chunks),
            corrupt_reads: counter(&self.counters.corrupt_reads),
            timed_out_reads: counter(&self.counters.timed_out_reads),
            errors: lock_plain(&self.counters.errors).clone(),
            window_search: window_search.clone(),
            in_flight_max: u64::from(stats.in_flight_max),
            busy_s: seconds(counter(&self.counters.busy_ns)),
            bytes_per_s: counter(&self.counters.bytes_per_s),
            io_mode: io_mode(stats),
            fallbacks: stats.fallbacks.clone(),
            claims: None,
        }
    }
}

pub(crate) fn io_mode(stats: &TierStats) -> String {
    let mode = stats.io_mode;
    let parts = [
        (mode.ring, "io_uring"),
        (mode.direct, "o_direct"),
        (mode.registered_buffers, "registered_buffers"),
        (mode.registered_files, "registered_files"),
    ];
    let used: Vec<&str> = parts.iter().filter(|(used, _)| *used).map(|(_, name)| *name).collect();
    used.join("+")
}
