//! The books of claims on one tier: callers write into them, the staging thread does what they say.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use kv_chunk::Digest;
use kv_cxl::Places;
use kv_staging::{Claim, ClaimId, Object};

use super::{
    books::{State, names, object_id},
    plan::{OUTPUTS_MAX, Plan},
    schedule::Schedule,
    status::{ClaimStatus, Told},
    uses::Uses,
};
use crate::{ByteSize, FlashSection, clock::now_ns, sync::lock_plain};

/// So many chunks for each claim that may be: all together claims name no more.
const CHUNKS_PER_CLAIM: usize = 256;

/// One tier's claims. Nothing in here does I/O or waits.
#[derive(Debug)]
pub(crate) struct Desk {
    places: Places,
    section: FlashSection,
    state: Mutex<State>,
    /// There is something for the thread to look at.
    news: Condvar,
}

impl Desk {
    pub(super) fn new(section: FlashSection, capacity: ByteSize, places: Places) -> Self {
        let state = State {
            controller: section.controller(capacity),
            uses: Uses::new(section.quantile_percent()),
            schedule: None,
            outputs: VecDeque::new(),
            by_request: HashMap::new(),
            held: HashMap::new(),
            unread: HashMap::new(),
            claimed_chunks: 0,
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
        let mut objects: Vec<Object> = digests.iter().filter_map(object).collect();
        objects.sort_unstable_by_key(|object| object.id);
        objects.dedup_by_key(|object| object.id);
        let now_ns = now_ns();
        let mut state = lock_plain(&self.state);
        if state.cancel(request, now_ns) {
            self.ring(&mut state);
        }
        if objects.is_empty() {
            return Some((0, 0));
        }
        let is_open = !state.gone && state.close_by_ns.is_none();
        // A claim costs memory for each of its chunks.
        let is_open = is_open && state.claimed_chunks + objects.len() <= self.claimed_chunks_max();
        let Some(id) = is_open.then(|| state.controller.record(&objects).ok()).flatten() else {
            state.refused += 1;
            return None;
        };
        let counted = state.enter(id, request.into(), now_ns);
        state.uses.recorded(id, use_at_ns);
        self.ring(&mut state);
        Some(counted)
    }

    fn claimed_chunks_max(&self) -> usize {
        self.section.claims_max.saturating_mul(CHUNKS_PER_CLAIM)
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

    /// Gives up all claims that name a chunk: it is to be removed.
    pub(crate) fn give_up(&self, digest: Digest) {
        let mut state = lock_plain(&self.state);
        let object = object_id(digest);
        let claims = state.controller.claims().filter(|claim| names(claim, object));
        let claims: Vec<ClaimId> = claims.map(Claim::id).collect();
        let now_ns = now_ns();
        for id in claims {
            if let Some(request) = state.held.get(&id).map(|held| Arc::clone(&held.request)) {
                state.forget_name(&request, id);
            }
            state.cancel_claim(id, now_ns);
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
        state.claimed_chunks = 0;
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
