//! What the books of claims say: who claimed what, and what becomes of it.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    sync::Arc,
};

use kv_chunk::Digest;
use kv_staging::{
    Claim, ClaimId, ClaimState, Controller, Effect, ObjectId, Retrieval, TimeToReady, TimeToUse,
};

use super::{plan::Plan, schedule::Schedule, status::Told, uses::Uses};
use crate::{FlashSection, clock::ns_from_ms};

#[derive(Debug)]
pub(super) struct State {
    pub(super) controller: Controller,
    pub(super) uses: Uses,
    /// The latest that nobody has projected yet, and when it was told.
    pub(super) schedule: Option<(u64, Arc<Schedule>)>,
    /// Of ended requests, in tokens, the latest last.
    pub(super) outputs: VecDeque<u64>,
    pub(super) by_request: HashMap<Arc<str>, ClaimId>,
    pub(super) held: HashMap<ClaimId, Held>,
    /// Who claimed a chunk that nobody has read since.
    pub(super) unread: HashMap<ObjectId, Vec<ClaimId>>,
    /// Of all claims, a chunk as often as it is claimed.
    pub(super) claimed_chunks: usize,
    /// To be done by the thread, in this order: what is given back comes before what takes its room.
    pub(super) effects: VecDeque<Effect>,
    /// The thread shall look before its time.
    pub(super) rung: bool,
    /// End, and be done by then.
    pub(super) close_by_ns: Option<u64>,
    /// The thread has ended: nothing is recorded any more.
    pub(super) gone: bool,
    pub(super) told: Told,
    pub(super) expired: u64,
    pub(super) refused: u64,
    pub(super) revised: u64,
    pub(super) schedules: u64,
    pub(super) protected_chunks: u64,
    pub(super) demand_chunks: u64,
}

/// What the books say of one claim besides its state.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) request: Arc<str>,
    pub(super) objects: Box<[ObjectId]>,
    /// Those that nobody has read since.
    pub(super) left: usize,
    /// Recorded or revised.
    pub(super) touched_ns: u64,
    /// Its retrieval began.
    pub(super) begun: bool,
    /// And went on without protection.
    pub(super) unprotected: bool,
}

pub(super) fn object_id(digest: Digest) -> ObjectId {
    ObjectId(u128::from_be_bytes(digest.to_bytes()))
}

pub(super) fn digest_of(object: ObjectId) -> Digest {
    Digest::from_bytes(object.0.to_be_bytes())
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
        self.claimed_chunks -= held.objects.len();
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
    pub(super) fn forget_name(&mut self, request: &str, id: ClaimId) {
        if self.by_request.get(request) == Some(&id) {
            self.by_request.remove(request);
        }
    }

    /// Enters a claim just recorded; gives chunks and bytes.
    pub(super) fn enter(&mut self, id: ClaimId, request: Arc<str>, now_ns: u64) -> (u64, u64) {
        let Some(claim) = self.controller.claim(id) else { return (0, 0) };
        let objects: Box<[ObjectId]> = claim.objects().iter().map(|object| object.id).collect();
        let counted = (objects.len() as u64, claim.bytes());
        for object in &objects {
            self.unread.entry(*object).or_default().push(id);
        }
        self.by_request.insert(Arc::clone(&request), id);
        let left = objects.len();
        self.claimed_chunks += left;
        let (begun, unprotected) = (false, false);
        let held = Held { request, objects, left, touched_ns: now_ns, begun, unprotected };
        self.held.insert(id, held);
        counted
    }

    /// A chunk that anybody reads is above the tier from then on: it counts as read for all who claimed it. With the last
    /// of its chunks a claim's retrieval begins.
    pub(super) fn begin(&mut self, wanted: &HashSet<Digest>, now_ns: u64) -> Vec<ClaimId> {
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

    pub(super) fn finish(&mut self, id: ClaimId, now_ns: u64) {
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

    pub(super) fn cancel(&mut self, request: &str, now_ns: u64) -> bool {
        let Some(id) = self.by_request.remove(request) else { return false };
        self.cancel_claim(id, now_ns);
        true
    }

    pub(super) fn cancel_claim(&mut self, id: ClaimId, now_ns: u64) {
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
        let mut staging = self.controller.claims().filter(|it| it.state() == ClaimState::Staging);
        staging.any(|claim| names(claim, object))
    }

    /// Whether anything waits for its time.
    pub(super) fn is_waiting(&self) -> bool {
        self.controller.claims().any(|claim| claim.state() <= ClaimState::Committed)
    }
}

/// Whether the claim is on that object.
pub(super) fn names(claim: &Claim, object: ObjectId) -> bool {
    claim.objects().binary_search_by_key(&object, |named| named.id).is_ok()
}
