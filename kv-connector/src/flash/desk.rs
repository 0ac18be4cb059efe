//! The books of claims on one tier: callers write into them, the staging thread does what they say.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use kv_chunk::Digest;
use kv_cxl::Places;
use kv_staging::{
    ClaimId, ClaimState, Controller, Effect, Object, ObjectId, Retrieval, TimeToReady, TimeToUse,
};

use super::{
    plan::{OUTPUTS_MAX, Plan},
    policy::UsualBytes,
    schedule::Schedule,
    status::{ClaimStatus, Told},
    uses::Uses,
};
use crate::{
    ByteSize, FlashSection,
    clock::{now_ns, ns_from_ms},
    sync::lock_plain,
};

/// One tier's claims. Nothing in here does I/O or waits.
#[derive(Debug)]
pub(crate) struct Desk {
    places: Places,
    section: FlashSection,
    state: Mutex<State>,
    /// There is something for the thread to look at.
    news: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) controller: Controller,
    uses: Uses,
    /// The latest that nobody has projected yet, and when it was told.
    schedule: Option<(u64, Arc<Schedule>)>,
    /// Of ended requests, in tokens, the latest last.
    outputs: VecDeque<u64>,
    usual: UsualBytes,
    by_request: HashMap<Arc<str>, ClaimId>,
    held: HashMap<ClaimId, Held>,
    /// Who claimed a chunk that nobody has read since.
    unread: HashMap<ObjectId, Vec<ClaimId>>,
    /// To be done by the thread, in this order: what is given back comes before what takes its room.
    pub(super) effects: VecDeque<Effect>,
    /// The thread shall look before its time.
    rung: bool,
    /// End, and be done by then.
    pub(super) close_by_ns: Option<u64>,
    /// The thread has ended: nothing is recorded any more.
    gone: bool,
    pub(super) told: Told,
    expired: u64,
    refused: u64,
    revised: u64,
    schedules: u64,
    protected_chunks: u64,
    demand_chunks: u64,
}

/// What the books say of one claim besides its state.
#[derive(Debug)]
struct Held {
    request: Arc<str>,
    objects: Box<[ObjectId]>,
    /// Those that nobody has read since.
    left: usize,
    /// Recorded or revised.
    touched_ns: u64,
    /// Its retrieval began.
    begun: bool,
    /// And went on without protection.
    unprotected: bool,
}

pub(super) fn object_id(digest: Digest) -> ObjectId {
    ObjectId(u128::from_be_bytes(digest.to_bytes()))
}

pub(super) fn digest_of(object: ObjectId) -> Digest {
    Digest::from_bytes(object.0.to_be_bytes())
}

impl Desk {
    pub(super) fn new(section: FlashSection, capacity: ByteSize, places: Places) -> Self {
        let usual = UsualBytes::default();
        let state = State {
            controller: section.controller(capacity, usual.clone()),
            uses: Uses::new(section.quantile_percent()),
            schedule: None,
            outputs: VecDeque::new(),
            usual,
            by_request: HashMap::new(),
            held: HashMap::new(),
            unread: HashMap::new(),
            effects: VecDeque::new(),
            rung: false,
            close_by_ns: None,
            gone: false,
            told: Told::default(),
            expired: 0,
            refused: 0,
            revised: 0,
            schedules: 0,
            protected_chunks: 0,
            demand_chunks: 0,
        };
        Self { places, section, state: Mutex::new(state), news: Condvar::new() }
    }

    pub(super) fn section(&self) -> &FlashSection {
        &self.section
    }

    pub(super) fn places(&self) -> &Places {
        &self.places
    }

    /// Records a claim of `request` on what of `digests` is here; a second one replaces the first. Gives chunks and bytes.
    pub(crate) fn claim(
        &self,
        request: &str,
        digests: &[Digest],
        use_at_ns: Option<u64>,
    ) -> Option<(u64, u64)> {
        let object = |digest: &Digest| {
            let place = self.places.get(*digest)?;
            Some(Object { id: object_id(*digest), bytes: place.extent.bytes })
        };
        let objects: Vec<Object> = digests.iter().filter_map(object).collect();
        let now_ns = now_ns();
        let mut state = lock_plain(&self.state);
        if state.cancel(request, now_ns) {
            self.ring(&mut state);
        }
        if objects.is_empty() {
            return Some((0, 0));
        }
        let is_open = !state.gone && state.close_by_ns.is_none();
        let Some(id) = is_open.then(|| state.controller.record(&objects).ok()).flatten() else {
            state.refused += 1;
            return None;
        };
        let counted = state.enter(id, request.into(), now_ns);
        state.uses.recorded(id, use_at_ns);
        self.ring(&mut state);
        Some(counted)
    }

    /// Another time of use; none: it is projected. False: the request has no claim here.
    pub(crate) fn revise(&self, request: &str, use_at_ns: Option<u64>) -> bool {
        let mut state = lock_plain(&self.state);
        let Some(&id) = state.by_request.get(request) else { return false };
        state.uses.told(id, use_at_ns);
        state.revised += 1;
        if let Some(held) = state.held.get_mut(&id) {
            held.touched_ns = now_ns();
        }
        self.ring(&mut state);
        true
    }

    /// What the scheduler runs and has waiting; gives how many claims it names.
    pub(crate) fn schedule(&self, schedule: &Arc<Schedule>) -> usize {
        let mut state = lock_plain(&self.state);
        if state.gone || state.close_by_ns.is_some() {
            return 0;
        }
        let now_ns = now_ns();
        state.outputs.extend(&schedule.ended);
        let excess = state.outputs.len().saturating_sub(OUTPUTS_MAX);
        state.outputs.drain(..excess);
        let mut named = 0;
        for it in &schedule.waiting {
            let Some(id) = state.by_request.get(&*it.request).copied() else { continue };
            named += 1;
            if let Some(held) = state.held.get_mut(&id) {
                held.touched_ns = now_ns;
            }
        }
        state.schedules += 1;
        state.revised += named as u64;
        state.schedule = Some((now_ns, Arc::clone(schedule)));
        self.ring(&mut state);
        named
    }

    /// Projects a schedule that was not yet. Outside of the lock: callers do not wait for it.
    pub(super) fn follow(&self, plan: Option<Plan>, now_ns: u64) -> Option<Plan> {
        let news = self.locked(|state| {
            let (as_of_ns, schedule) = state.schedule.take()?;
            Some((as_of_ns, schedule, state.outputs.clone()))
        });
        let plan = match news {
            Some((as_of_ns, schedule, outputs)) => {
                let quantile_percent = self.section.quantile_percent();
                Some(Plan::new(&schedule, as_of_ns, outputs, quantile_percent))
            }
            None => plan,
        };
        plan.filter(|plan| !plan.is_stale(now_ns))
    }

    /// Gives the request's claim up, in any state. False: it has none here.
    pub(crate) fn cancel(&self, request: &str) -> bool {
        let mut state = lock_plain(&self.state);
        let had = state.cancel(request, now_ns());
        self.ring(&mut state);
        had
    }

    /// The request's claim.
    pub(crate) fn id(&self, request: &str) -> Option<ClaimId> {
        lock_plain(&self.state).by_request.get(request).copied()
    }

    /// Gives up one claim, whatever its request has claimed since.
    pub(crate) fn cancel_claim(&self, id: ClaimId) {
        let mut state = lock_plain(&self.state);
        if let Some(request) = state.held.get(&id).map(|held| Arc::clone(&held.request)) {
            state.forget_name(&request, id);
            state.cancel_claim(id, now_ns());
            self.ring(&mut state);
        }
    }

    /// Somebody begins to read `wanted`; the claims whose retrieval begins with it.
    pub(super) fn begin(&self, wanted: &HashSet<Digest>) -> Vec<ClaimId> {
        let mut state = lock_plain(&self.state);
        if state.held.is_empty() {
            return Vec::new();
        }
        let begun = state.begin(wanted, now_ns());
        if !begun.is_empty() {
            self.ring(&mut state);
        }
        begun
    }

    /// It has been read and copied.
    pub(super) fn finish(&self, claims: &[ClaimId]) {
        let mut state = lock_plain(&self.state);
        let now_ns = now_ns();
        claims.iter().for_each(|id| state.finish(*id, now_ns));
        self.ring(&mut state);
    }

    /// Cancels everything; the thread ends when nothing is protected or staged any more.
    pub(crate) fn close(&self, by_ns: u64) {
        let mut state = lock_plain(&self.state);
        state.close_by_ns = Some(by_ns);
        let now_ns = now_ns();
        let all: Vec<ClaimId> = state.held.keys().copied().collect();
        all.into_iter().for_each(|id| state.cancel_claim(id, now_ns));
        self.ring(&mut state);
    }

    /// The thread has ended.
    pub(super) fn leave(&self) {
        let mut state = lock_plain(&self.state);
        state.gone = true;
        state.told.protected_bytes = 0;
        state.by_request.clear();
        state.held.clear();
        state.unread.clear();
        state.effects.clear();
        state.schedule = None;
    }

    pub(super) fn locked<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut lock_plain(&self.state))
    }

    /// Waits for news, `limit` at most.
    pub(super) fn wait(&self, limit: Duration) {
        let state = lock_plain(&self.state);
        let quiet = |state: &mut State| !state.rung;
        let waited = self.news.wait_timeout_while(state, limit, quiet);
        waited.unwrap_or_else(PoisonError::into_inner).0.rung = false;
    }

    pub(crate) fn status(&self) -> ClaimStatus {
        let state = lock_plain(&self.state);
        let mut status = ClaimStatus::new(&self.section, &state.controller, &state.told, now_ns());
        (status.expired, status.refused, status.revised) =
            (state.expired, state.refused, state.revised);
        (status.protected_chunks, status.demand_chunks) =
            (state.protected_chunks, state.demand_chunks);
        status.schedules = state.schedules;
        status
    }

    fn ring(&self, state: &mut State) {
        state.rung = true;
        self.news.notify_one();
    }
}

/// Time until use of all claims: by the schedule that names them, else as their callers said, else, where there is no
/// schedule, by the pace of the retrievals so far.
struct Outlooks<'a> {
    plan: Option<&'a Plan>,
    uses: &'a Uses,
    held: &'a HashMap<ClaimId, Held>,
}

impl TimeToUse for Outlooks<'_> {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        let Some(plan) = self.plan else { return self.uses.time_to_use_ns(claim, now_ns) };
        let planned = plan.time_to_use_ns(&self.held.get(&claim)?.request, now_ns);
        planned.or_else(|| self.uses.told_time_to_use_ns(claim, now_ns))
    }

    /// Of one time nobody knows how likely it is.
    fn use_chance_permille(&self, claim: ClaimId, within_ns: u64, now_ns: u64) -> Option<u32> {
        self.plan?.use_chance_permille(&self.held.get(&claim)?.request, within_ns, now_ns)
    }
}

impl State {
    /// Has the controller look at all claims.
    pub(super) fn look(&mut self, plan: Option<&Plan>, ready: &dyn TimeToReady, now_ns: u64) {
        // The first schedule came this moment: it decides.
        if plan.is_none() && self.schedule.is_some() {
            return;
        }
        let outlooks = Outlooks { plan, uses: &self.uses, held: &self.held };
        let mut effects = Vec::new();
        self.controller.tick(now_ns, &outlooks, ready, &mut effects);
        self.note(effects, now_ns);
    }

    /// Keeps what the controller said: work for the thread, and claims that are gone.
    pub(super) fn note(&mut self, effects: Vec<Effect>, now_ns: u64) {
        for effect in effects {
            match effect {
                Effect::Stage(_) | Effect::Unprotect(_) => self.effects.push_back(effect),
                // It was wanted before it was ready.
                Effect::Ready(id) => self.start_reading(id, now_ns),
                Effect::Failed(id) => self.count_demand(id),
                Effect::Released(id) => self.forget(id),
            }
        }
    }

    fn forget(&mut self, id: ClaimId) {
        let Some(held) = self.held.remove(&id) else { return };
        for object in &held.objects {
            if let Entry::Occupied(mut claims) = self.unread.entry(*object) {
                claims.get_mut().retain(|claim| *claim != id);
                if claims.get().is_empty() {
                    claims.remove();
                }
            }
        }
        self.uses.gone(id, !held.begun);
        self.forget_name(&held.request, id);
    }

    /// The request no longer has this claim; one that replaced it stays.
    fn forget_name(&mut self, request: &str, id: ClaimId) {
        if self.by_request.get(request) == Some(&id) {
            self.by_request.remove(request);
        }
    }

    /// Enters a claim just recorded; gives chunks and bytes.
    fn enter(&mut self, id: ClaimId, request: Arc<str>, now_ns: u64) -> (u64, u64) {
        let Some(claim) = self.controller.claim(id) else { return (0, 0) };
        let objects: Box<[ObjectId]> = claim.objects().iter().map(|object| object.id).collect();
        let counted = (objects.len() as u64, claim.bytes());
        self.usual.recorded(counted.1);
        for object in &objects {
            self.unread.entry(*object).or_default().push(id);
        }
        self.by_request.insert(Arc::clone(&request), id);
        let left = objects.len();
        let (begun, unprotected) = (false, false);
        let held = Held { request, objects, left, touched_ns: now_ns, begun, unprotected };
        self.held.insert(id, held);
        counted
    }

    /// A chunk that anybody reads is above the tier from then on: it counts as read for all who claimed it. With the last
    /// of its chunks a claim's retrieval begins.
    fn begin(&mut self, wanted: &HashSet<Digest>, now_ns: u64) -> Vec<ClaimId> {
        let mut begun = Vec::new();
        for digest in wanted {
            for id in self.unread.remove(&object_id(*digest)).unwrap_or_default() {
                let Some(held) = self.held.get_mut(&id) else { continue };
                held.left -= 1;
                if held.left == 0 && !held.begun {
                    held.begun = true;
                    begun.push(id);
                }
            }
        }
        for &id in &begun {
            self.uses.began(id, now_ns);
            self.start_reading(id, now_ns);
        }
        begun
    }

    /// Reading goes on whatever the answer is: what is not there comes through the flash.
    fn start_reading(&mut self, id: ClaimId, now_ns: u64) {
        if !self.held.get(&id).is_some_and(|held| held.begun) {
            return;
        }
        match self.controller.begin_retrieval(id, now_ns) {
            Ok(Retrieval::Protected) => self.protected_chunks += self.chunks(id),
            Ok(Retrieval::Demand) => self.count_demand(id),
            // It is being staged: looked at again when it is ready, or read without.
            Ok(Retrieval::Wait) | Err(_) => {}
        }
    }

    fn count_demand(&mut self, id: ClaimId) {
        let chunks = self.chunks(id);
        let Some(held) = self.held.get_mut(&id).filter(|held| held.begun) else { return };
        if !std::mem::replace(&mut held.unprotected, true) {
            self.demand_chunks += chunks;
        }
    }

    fn chunks(&self, id: ClaimId) -> u64 {
        self.controller.claim(id).map_or(0, |claim| claim.objects().len() as u64)
    }

    fn finish(&mut self, id: ClaimId, now_ns: u64) {
        let Some(claim) = self.controller.claim(id) else { return };
        match claim.state() {
            ClaimState::Retrieving | ClaimState::RetrievalDraining => {
                let mut effects = Vec::new();
                let finished = self.controller.finish_retrieval(id, now_ns, &mut effects);
                debug_assert!(finished.is_ok(), "it is being retrieved");
                self.note(effects, now_ns);
            }
            // Still being staged: it was read without.
            _ => {
                self.count_demand(id);
                self.cancel_claim(id, now_ns);
            }
        }
    }

    fn cancel(&mut self, request: &str, now_ns: u64) -> bool {
        let Some(id) = self.by_request.remove(request) else { return false };
        self.cancel_claim(id, now_ns);
        true
    }

    fn cancel_claim(&mut self, id: ClaimId, now_ns: u64) {
        let mut effects = Vec::new();
        // One that is gone needs no cancelling.
        let _ = self.controller.cancel(id, now_ns, &mut effects);
        self.note(effects, now_ns);
    }

    /// Cancels what nobody has touched for too long.
    pub(super) fn expire(&mut self, section: &FlashSection, now_ns: u64) {
        let limit_ns = ns_from_ms(section.claim_deadline_ms);
        let late = |held: &Held| now_ns.saturating_sub(held.touched_ns) > limit_ns;
        let late: Vec<ClaimId> =
            self.held.iter().filter(|(_, held)| late(held)).map(|(id, _)| *id).collect();
        for id in late {
            if let Some(held) = self.held.get_mut(&id) {
                held.touched_ns = now_ns;
                self.expired += 1;
                let request = Arc::clone(&held.request);
                self.forget_name(&request, id);
            }
            self.cancel_claim(id, now_ns);
        }
    }

    /// Whether some claim is to have the object staged.
    pub(super) fn is_wanted(&self, object: ObjectId) -> bool {
        let staging = self.controller.claims().filter(|it| it.state() == ClaimState::Staging);
        let mut objects = staging.map(kv_staging::Claim::objects);
        objects.any(|it| it.binary_search_by_key(&object, |named| named.id).is_ok())
    }

    /// Whether anything waits for its time.
    pub(super) fn is_waiting(&self) -> bool {
        self.controller.claims().any(|claim| claim.state() <= ClaimState::Committed)
    }
}
