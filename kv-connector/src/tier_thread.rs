//! The thread that owns one tier: takes steps, keeps the tier's windows full, and hands over what lands.
//!
//! One turn: look into the inbox, collect completions, refill the window, start writes, and only then verify one read
//! that landed, so that the device works meanwhile. Nothing here waits for anything but the bell, the tier's own file
//! descriptor and a timer.

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
};

use kv_chunk::{Digest, WriteId};
use kv_router::{Breaker, BreakerConfig, BreakerState, KneeConfig, TierId, TierQueue, Window};
use kv_tiers::{Completion, EvictionGuard, Tier};

use crate::{
    EngineError, Event,
    clock::{now_ns, ns_from_ms},
    directory::Directory,
    shared::{Inquiry, Shared},
    tier_handle::{Snapshot, TierHandle},
};

mod chores;
mod depth;
mod inquiries;
mod reads;
mod sleep;
mod sounding;
mod writes;

pub(crate) use self::{chores::CHORE_READS_MAX, sounding::Sample};
use self::{
    chores::Chores,
    depth::Depth,
    reads::{Landed, Rate, Read},
    sleep::Sleeper,
    sounding::Sounding,
    writes::WritePause,
};

/// Steps that one tier has in its queue; a step beyond is read from the other tiers.
const STEPS_MAX: usize = 4096;

pub(crate) struct Worker {
    tier: Box<dyn Tier>,
    id: TierId,
    shared: Arc<Shared>,
    queue: TierQueue<crate::step::StepHandle>,
    window: Window,
    depth: Depth,
    sounding: Sounding,
    breaker: Breaker,
    /// Reads in flight, by op: overdue ones stay until they come in.
    reads: HashMap<u64, Read>,
    /// The op that probes a tier whose breaker is open, and when it is overdue.
    probe: Option<(u64, u64)>,
    /// Writes in flight, by op.
    writes: HashMap<u64, (Digest, WriteId)>,
    next_op: u64,
    landed: VecDeque<Landed>,
    completions: Vec<Completion>,
    rate: Rate,
    chores: Chores,
    pause: WritePause,
    /// Look-ups that the tier has not answered.
    inquiries: Vec<Inquiry>,
    holding_writes: bool,
    /// No slot was free at the last refill.
    starved: bool,
    /// The tier refuses work, or the engine closes: nothing is started any more.
    gone: bool,
    close_by_ns: Option<u64>,
}

/// Starts the thread of `tier`. It ends after the engine asked it to close.
pub(crate) fn spawn(
    shared: &Arc<Shared>,
    id: TierId,
    tier: Box<dyn Tier>,
    sample: Sample,
) -> Result<JoinHandle<()>, EngineError> {
    let handle = &shared.tiers[id.index()];
    let name = format!("kvb-{}", handle.name);
    // Thread names are cut at 15 bytes by the system.
    let worker = Worker::new(shared, id, tier, sample);
    // Whoever asks before the thread runs learns what was found at open.
    worker.put_snapshot();
    let sleeper = Sleeper::new()?;
    thread::Builder::new()
        .name(name)
        .spawn(move || run(worker, sleeper))
        .map_err(|source| EngineError::system(format!("the thread of tier {}", id.0), source))
}

fn run(mut worker: Worker, mut sleeper: Sleeper) {
    let ended = catch_unwind(AssertUnwindSafe(|| worker.run(&mut sleeper)));
    if ended.is_err() {
        worker.abandon();
        // What state the driver is in is unknown, a device may still write its buffers: they are left to it.
        let _: &'static mut Worker = Box::leak(Box::new(worker));
    }
}

impl Worker {
    fn new(shared: &Arc<Shared>, id: TierId, tier: Box<dyn Tier>, sample: Sample) -> Self {
        let handle = &shared.tiers[id.index()];
        let mut breaker = BreakerConfig::default();
        let queue_max = tier.capabilities().queue_ops_max.max(1);
        let KneeConfig { min, max, start } = handle.windows;
        let windows = KneeConfig {
            min: min.min(queue_max),
            max: max.min(queue_max),
            start: start.min(queue_max),
        };
        breaker.failures = breaker.failures.min(windows.start);
        let depth = Depth::new(windows);
        // What a probe reads beside its tier's window must not be what the other tiers read into.
        let sounding = if depth.is_learned() && shared.holds_two_windows() {
            Sounding::new(sample, depth.max())
        } else {
            Sounding::default()
        };
        Self {
            id,
            queue: TierQueue::new(id, STEPS_MAX),
            window: Window::new(windows.start),
            depth,
            sounding,
            breaker: Breaker::new(breaker),
            reads: HashMap::new(),
            probe: None,
            writes: HashMap::new(),
            next_op: 0,
            landed: VecDeque::new(),
            completions: Vec::new(),
            rate: Rate::default(),
            chores: Chores::default(),
            pause: WritePause::default(),
            inquiries: Vec::new(),
            holding_writes: false,
            starved: false,
            gone: false,
            close_by_ns: None,
            shared: Arc::clone(shared),
            tier,
        }
    }

    fn handle(&self) -> &TierHandle {
        &self.shared.tiers[self.id.index()]
    }

    fn run(&mut self, sleeper: &mut Sleeper) {
        loop {
            let mut now = now_ns();
            let mut busy = self.look_into_inbox(now);
            let mut wake_ns = self.poll(now);
            busy |= self.take_completions(now);
            self.answer_inquiries(now);
            self.expire_reads(now);
            let write_ns = self.run_writes(now);
            let refilled = self.refill(now);
            if refilled | write_ns.started | self.sound(now) {
                busy = true;
                // Submitting only queues: this starts the device.
                now = now_ns();
                wake_ns = self.poll(now);
                self.take_completions(now);
            }
            busy |= !self.landed.is_empty();
            self.deliver_landed(now);
            busy |= self.run_chores(now);
            if self.is_done(now) {
                break;
            }
            if !busy {
                let until_ns = self.wake_ns(now, wake_ns, write_ns.wake_ns);
                sleeper.sleep(now, until_ns, self.handle().bell(), self.tier.wake_fd());
            }
        }
        self.leave();
    }

    /// True if there was anything.
    fn look_into_inbox(&mut self, now_ns: u64) -> bool {
        let inbox = self.handle().take_inbox();
        if inbox.snapshot_wanted {
            self.put_snapshot();
        }
        let any = !inbox.steps.is_empty();
        self.take_inquiries(inbox.inquiries, now_ns);
        if let Some(errand) = inbox.errand {
            self.begin_purge(errand);
        }
        self.remove_deleted(&inbox.removals, now_ns);
        for step in inbox.steps {
            if self.gone || !self.handle().is_readable() {
                step.0.mask_tier(self.id);
            } else if let Err(step) = self.queue.push(step) {
                step.0.mask_tier(self.id);
            }
        }
        if inbox.close_by_ns.is_some() && self.close_by_ns.is_none() {
            self.close_by_ns = inbox.close_by_ns;
            self.stop();
            self.tier.close();
        }
        self.probe_if_due(now_ns);
        any
    }

    fn poll(&mut self, now_ns: u64) -> Option<u64> {
        let guard = Guard { directory: &self.shared.directory, tier: self.id.0 };
        self.tier.poll(now_ns, &guard, &mut self.completions)
    }

    /// True if there were any.
    fn take_completions(&mut self, now_ns: u64) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        let any = !completions.is_empty();
        for completion in completions.drain(..) {
            match completion {
                Completion::Read { id, slot, result, .. } => {
                    self.read_completed(id, slot, result, now_ns);
                }
                Completion::Write { id, result, .. } => self.write_completed(id, result, now_ns),
                Completion::Evicted { digest } => {
                    self.forget(digest, Event::Evicted { digest, tier: self.id.0 });
                }
                Completion::Lost { digest, error } => {
                    tracing::warn!(tier = self.handle().name, %digest, %error, "chunk lost");
                    self.lose(digest);
                }
            }
        }
        self.completions = completions;
        any
    }

    /// A chunk that this tier no longer has leaves the directory, leased or not.
    fn forget(&self, digest: Digest, event: Event) {
        if self.tier.contains(digest).is_none() {
            self.shared.directory.clear(digest, self.id.0);
            self.shared.tell(event);
        }
    }

    fn lose(&self, digest: Digest) {
        crate::tier_handle::TierCounters::add(&self.handle().counters.lost_chunks, 1);
        self.forget(digest, Event::Lost { digest, tier: self.id.0 });
    }

    /// Starts nothing more: steps go on without this tier.
    fn stop(&mut self) {
        self.gone = true;
        self.handle().set_readable(false);
        for step in self.queue.steps() {
            step.0.mask_tier(self.id);
        }
        self.shared.ring_others(self.id);
    }

    /// The tier refuses all work: what it held is gone with it.
    fn lose_tier(&mut self) {
        if !self.gone {
            tracing::error!(tier = self.handle().name, "tier is gone");
            self.stop();
            self.shared.directory.clear_tier(self.id.0);
            self.shared.writeback.tier_gone(self.id.0);
        }
    }

    fn is_done(&self, now_ns: u64) -> bool {
        self.close_by_ns.is_some_and(|by_ns| self.tier.in_flight() == 0 || now_ns >= by_ns)
    }

    /// The orderly end. Dropping the tier waits a bounded time for what is in flight, then leaks it.
    fn leave(&mut self) {
        self.put_snapshot();
        self.give_up_reads();
        self.shared.writeback.tier_gone(self.id.0);
    }

    /// The end after a panic: loads and stores must not wait for this thread.
    fn abandon(&mut self) {
        tracing::error!(tier = self.handle().name, "the tier's thread panicked: tier is gone");
        self.gone = true;
        self.give_up_reads();
        self.shared.directory.clear_tier(self.id.0);
        self.shared.writeback.tier_gone(self.id.0);
        let last = Snapshot { breaker: "gone", ..Snapshot::default() };
        self.handle().put_snapshot(last);
        self.shared.ring_others(self.id);
    }

    fn give_up_reads(&mut self) {
        self.inquiries.clear();
        for step in self.handle().shut_inbox() {
            step.0.mask_tier(self.id);
        }
        for step in self.queue.steps() {
            step.0.mask_tier(self.id);
        }
        self.fail_all_reads();
        self.give_up_chores();
    }

    fn put_snapshot(&self) {
        let breaker = match self.breaker.state(now_ns()) {
            _ if self.gone && self.close_by_ns.is_none() => "gone",
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half_open",
        };
        let writes_paused = self.pause.is_paused();
        let stats = self.tier.stats();
        let mut window_search = self.depth.status(self.window.limit());
        window_search.probe = self.sounding.found.clone();
        self.handle().put_snapshot(Snapshot {
            stats,
            breaker,
            writes_paused,
            window_search,
            ..Snapshot::default()
        });
    }

    fn wake_ns(&mut self, now_ns: u64, tier_ns: Option<u64>, write_ns: Option<u64>) -> u64 {
        const IDLE_NS: u64 = 1_000_000_000;
        const STARVED_NS: u64 = 200_000;
        const UNFINISHED_NS: u64 = 2_000_000;
        const RECHECK_NS: u64 = 10_000_000;
        let mut wait_ns = IDLE_NS;
        if self.starved {
            wait_ns = STARVED_NS;
        } else if !self.gone && self.window.room() > 0 && !self.queue.is_idle() {
            // Another tier's completion can make something claimable here.
            wait_ns = UNFINISHED_NS;
        } else if self.holding_writes || self.close_by_ns.is_some() {
            wait_ns = RECHECK_NS;
        }
        let breaker_ns = (self.breaker.state(now_ns) != BreakerState::Closed)
            .then(|| now_ns.saturating_add(10 * RECHECK_NS));
        let ours = now_ns.saturating_add(wait_ns);
        let chores_ns = self.chores_wake_ns(now_ns);
        let reads_ns = self.next_read_deadline_ns();
        let others = [tier_ns, write_ns, breaker_ns, chores_ns, reads_ns, self.sounding_ns()];
        others.into_iter().flatten().fold(ours, u64::min)
    }

    fn read_deadline_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_add(ns_from_ms(self.shared.config.read_deadline_ms))
    }
}

/// Only the directory knows leases.
struct Guard<'a> {
    directory: &'a Directory,
    tier: u8,
}

impl EvictionGuard for Guard<'_> {
    fn try_evict(&self, digest: Digest) -> bool {
        self.directory.try_evict(digest, self.tier)
    }

    fn may_evict(&self, digest: Digest) -> bool {
        !self.directory.is_leased(digest)
    }
}
