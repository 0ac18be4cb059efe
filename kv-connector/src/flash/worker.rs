//! The thread that does what the books of claims say: reserve (done in the books), protect, stage, verify, ready.

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use kv_cxl::{
    FastTier, FastTierError, GranuleCounts, Place, Protection, Residency, StageEvent, StageId,
    Staging,
};
use kv_staging::{Effect, Object, ObjectId};

use super::{books::digest_of, desk::Desk, plan::Plan, ready::Ready, status::Told};
use crate::{
    EngineError,
    clock::{self, now_ns},
    directory::Directory,
};

/// Claims are looked at so often while any waits for its time ...
const TICK_NS: u64 = 20_000_000;
/// ... and no more often than this, however much happens.
const REST_NS: u64 = 1_000_000;
const IDLE_NS: u64 = 1_000_000_000;
/// A look is followed by a pause so many times as long.
const LOOK_SHARE: u64 = 4;
/// Chunks given to the device at a time: what is given cannot be taken back.
const STAGES_MAX: usize = 8;

struct Worker {
    memory: Box<dyn FastTier>,
    desk: Arc<Desk>,
    directory: Arc<Directory>,
    tier: u8,
    ready: Ready,
    /// What the latest schedule says.
    plan: Option<Plan>,
    /// Who protects what: protection does not nest.
    pins: GranuleCounts,
    held: HashMap<ObjectId, Pin>,
    in_flight: HashMap<StageId, Object>,
    next_stage: u64,
    /// What the books said and is not done yet.
    todo: VecDeque<Effect>,
    /// What the books are to be told: an object is ready, or could not be staged.
    answers: Vec<(ObjectId, bool)>,
    told: Told,
    ticked_ns: u64,
    /// How long the last look took.
    look_ns: u64,
    closing: bool,
}

/// A chunk that is kept where it is, and protected there.
struct Pin {
    place: Place,
    /// Bytes that were not there when staging began.
    absent_bytes: u64,
}

/// Whether claims on such memory can be staged: it says when it is done.
pub(super) fn can_stage(memory: &dyn FastTier) -> bool {
    matches!(memory.caps().staging, Staging::Blocking | Staging::Async { completion: true })
}

pub(super) fn spawn(
    memory: Box<dyn FastTier>,
    desk: &Arc<Desk>,
    directory: &Arc<Directory>,
    tier: u8,
) -> Result<JoinHandle<()>, EngineError> {
    let protection = match memory.caps().protection {
        Protection::Hard => "hard",
        Protection::Advisory => "advisory",
        _ => "none",
    };
    let told = Told { protection, ..Told::default() };
    desk.locked(|state| state.told = told.clone());
    let mut worker = Worker {
        pins: GranuleCounts::new(memory.caps().stage_granule_bytes),
        ready: Ready::new(desk.section().staging_bytes_per_s.0),
        plan: None,
        memory,
        desk: Arc::clone(desk),
        directory: Arc::clone(directory),
        tier,
        held: HashMap::new(),
        in_flight: HashMap::new(),
        next_stage: 0,
        todo: VecDeque::new(),
        answers: Vec::new(),
        told,
        ticked_ns: 0,
        look_ns: 0,
        closing: false,
    };
    let run = move || {
        let ended = catch_unwind(AssertUnwindSafe(|| worker.run()));
        if ended.is_err() {
            tracing::error!("the staging thread panicked: claims are no longer staged");
        }
        worker.release_all();
        worker.desk.leave();
    };
    thread::Builder::new()
        .name("kvb-staging".to_owned())
        .spawn(run)
        .map_err(|source| EngineError::system("a staging thread", source))
}

impl Worker {
    fn run(&mut self) {
        loop {
            let now = now_ns();
            let polled_ns = self.poll(now);
            let waiting = self.look_into_books(now);
            self.do_effects(now);
            self.ready.ask(&*self.memory, self.desk.places(), now);
            if self.closing && self.is_done(now) {
                break;
            }
            let next_tick_ns = if !self.answers.is_empty() {
                self.ticked_ns + self.rest_ns()
            } else if waiting {
                self.ticked_ns + self.rest_ns().max(TICK_NS)
            } else {
                now + IDLE_NS
            };
            let until_ns = polled_ns.map_or(next_tick_ns, |at_ns| at_ns.min(next_tick_ns));
            let closing_ns = if self.closing { now + REST_NS } else { u64::MAX };
            let limit_ns = until_ns.min(closing_ns).saturating_sub(now);
            self.desk.wait(Duration::from_nanos(limit_ns));
            let early_ns = (self.ticked_ns + self.rest_ns()).saturating_sub(now_ns());
            if early_ns > 0 {
                thread::sleep(Duration::from_nanos(early_ns));
            }
        }
    }

    /// Callers get the lock most of the time, however many claims there are to look at.
    fn rest_ns(&self) -> u64 {
        (LOOK_SHARE * self.look_ns).max(REST_NS)
    }

    fn poll(&mut self, now_ns: u64) -> Option<u64> {
        let mut events = Vec::new();
        let wake_ns = self.memory.poll(now_ns, &mut events);
        for event in events {
            let (id, result) = match event {
                StageEvent::Done(id) => (id, Ok(())),
                StageEvent::Failed(id, error) => (id, Err(error)),
            };
            let Some(object) = self.in_flight.remove(&id) else { continue };
            self.staged(object, result, now_ns);
        }
        wake_ns.filter(|_| !self.in_flight.is_empty())
    }

    /// Ready is what is still the same chunk, in the same place, and there.
    fn staged(&mut self, object: Object, result: Result<(), FastTierError>, now_ns: u64) {
        let Some(pin) = self.held.get(&object.id) else { return };
        let (place, absent_bytes) = (pin.place, pin.absent_bytes);
        let problem = match result.and_then(|()| self.memory.residency(&[place.extent])) {
            Ok(Residency::Bytes(there)) if there < place.extent.bytes => {
                Some(format!("{there} of {} bytes stayed", place.extent.bytes))
            }
            Ok(_) if self.desk.places().get(digest_of(object.id)) != Some(place) => {
                Some("the chunk is gone".to_owned())
            }
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        self.ready.ended(absent_bytes, problem.is_none(), now_ns);
        if let Some(problem) = &problem {
            tracing::debug!(digest = %digest_of(object.id), problem, "a chunk was not staged");
            self.told.failed_chunks += 1;
            self.unpin(object.id, now_ns);
        } else {
            self.told.staged_chunks += 1;
            self.told.staged_bytes += absent_bytes;
        }
        self.answers.push((object.id, problem.is_none()));
    }

    /// Tells the books what happened, and learns what is to be done. True if a claim waits for its time.
    fn look_into_books(&mut self, now_ns: u64) -> bool {
        self.plan = self.desk.follow(self.plan.take(), now_ns);
        let Self { desk, ready, plan, answers, todo, told, .. } = self;
        self.ticked_ns = now_ns;
        told.bytes_per_s = ready.bytes_per_s();
        told.by_tokens = plan.is_some();
        let (closing, waiting) = desk.locked(|state| {
            let mut effects = Vec::new();
            for (object, is_ready) in answers.drain(..) {
                let controller = &mut state.controller;
                let told = if is_ready {
                    controller.object_staged(object, now_ns, &mut effects)
                } else {
                    controller.object_failed(object, now_ns, &mut effects)
                };
                debug_assert!(told.is_ok(), "{told:?}");
            }
            state.note(effects, now_ns);
            state.expire(desk.section(), now_ns);
            state.look(plan.as_ref(), &*ready, now_ns);
            todo.extend(state.effects.drain(..));
            state.told = told.clone();
            (state.close_by_ns.is_some(), state.is_waiting())
        });
        self.closing = closing;
        self.look_ns = clock::now_ns().saturating_sub(now_ns);
        waiting
    }

    /// In their order, but what waits for the device holds up no release.
    fn do_effects(&mut self, now_ns: u64) {
        for effect in std::mem::take(&mut self.todo) {
            match effect {
                Effect::Unprotect(object) => self.unpin(object.id, now_ns),
                Effect::Stage(object) if self.in_flight.len() < STAGES_MAX => {
                    self.stage(object, now_ns);
                }
                _ => self.todo.push_back(effect),
            }
        }
        self.told.protected_bytes = self.pins.bytes();
        self.told.protected_bytes_max =
            self.told.protected_bytes_max.max(self.told.protected_bytes);
    }

    fn stage(&mut self, object: Object, now_ns: u64) {
        match self.try_stage(object, now_ns) {
            Ok(true) => {}
            Ok(false) => self.answers.push((object.id, false)),
            Err(FastTierError::QueueFull { .. }) => {
                self.unpin(object.id, now_ns);
                self.todo.push_back(Effect::Stage(object));
            }
            Err(error) => {
                tracing::debug!(digest = %digest_of(object.id), %error, "a chunk was not staged");
                self.told.failed_chunks += 1;
                self.unpin(object.id, now_ns);
                self.answers.push((object.id, false));
            }
        }
    }

    /// False: the chunk is gone, or nobody wants it any more.
    fn try_stage(&mut self, object: Object, now_ns: u64) -> Result<bool, FastTierError> {
        let digest = digest_of(object.id);
        if self.closing || !self.desk.locked(|state| state.is_wanted(object.id)) {
            return Ok(false);
        }
        // Not evicted from here on: protected memory of a chunk that is gone would serve nobody.
        if !self.directory.lease_resident(digest, 1 << self.tier) {
            return Ok(false);
        }
        let place = self.desk.places().get(digest);
        let Some(place) = place.filter(|place| place.extent.bytes == object.bytes) else {
            self.directory.release(digest);
            return Ok(false);
        };
        self.held.insert(object.id, Pin { place, absent_bytes: object.bytes });
        if self.memory.caps().protection != Protection::None {
            let fresh = self.pins.add(place.extent);
            self.memory.protect(&fresh, now_ns)?;
        }
        let there = match self.memory.residency(&[place.extent])? {
            Residency::Bytes(bytes) => bytes,
            Residency::Unknown => 0,
        };
        let absent_bytes = object.bytes.saturating_sub(there);
        let id = StageId(self.next_stage);
        self.memory.submit_stage(id, &[place.extent], now_ns)?;
        self.next_stage += 1;
        self.held.insert(object.id, Pin { place, absent_bytes });
        self.in_flight.insert(id, object);
        self.ready.submitted(absent_bytes, now_ns);
        Ok(true)
    }

    /// Its protection ends, unless another chunk needs it; it may be evicted again, and stays cached until it is.
    fn unpin(&mut self, object: ObjectId, now_ns: u64) {
        let Some(pin) = self.held.remove(&object) else { return };
        if self.memory.caps().protection != Protection::None {
            let last = self.pins.remove(pin.place.extent);
            if !last.is_empty()
                && let Err(error) = self.memory.unprotect(&last, now_ns)
            {
                tracing::warn!(%error, "protection could not be ended");
            }
        }
        self.directory.release(digest_of(object));
    }

    fn is_done(&self, now_ns: u64) -> bool {
        let by_ns = self.desk.locked(|state| state.close_by_ns).unwrap_or(0);
        let idle = self.in_flight.is_empty() && self.answers.is_empty() && self.todo.is_empty();
        (idle && self.held.is_empty()) || now_ns >= by_ns
    }

    /// Whatever is still protected at the end. What the device is bringing in stays protected until it is unmapped.
    fn release_all(&mut self) {
        let now_ns = now_ns();
        let staging: Vec<ObjectId> = self.in_flight.values().map(|object| object.id).collect();
        let all: Vec<ObjectId> = self.held.keys().copied().collect();
        for object in all.into_iter().filter(|object| !staging.contains(object)) {
            self.unpin(object, now_ns);
        }
    }
}
