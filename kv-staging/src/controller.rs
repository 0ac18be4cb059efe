//! Commits claims in the order of their slack, within a budget of protected bytes.

use std::{collections::BTreeMap, fmt};

use crate::{
    Budget, Claim, ClaimId, ClaimState, Move, Object, ObjectId, Report, StagingError, StagingNeed,
    TimeToReady, TimeToUse,
    objects::Objects,
    policy::{Outlook, Policy},
    turns,
};

/// When a committed claim begins to count in the budget. Compare C only between runs with the same choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Reservation {
    /// At commitment.
    #[default]
    Eager,
    /// At its first staged byte, and then the whole claim: were it byte by byte, two half-staged claims could wait for
    /// each other for ever.
    Lazy,
}

/// Options of [`Controller`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ControllerOptions {
    /// Most bytes protected at once. It must lie below what the device really lets one protect.
    pub protected_bytes_max: u64,
    /// When they count.
    pub reservation: Reservation,
    /// No further claim starts staging while this many bytes are in flight; one that has started stages all it lacks.
    pub in_flight_bytes_max: u64,
    /// Most claims alive.
    pub claims_max: usize,
}

impl ControllerOptions {
    /// Defaults: eager, any number of bytes in flight, 65,536 claims.
    pub const fn new(protected_bytes_max: u64) -> Self {
        Self {
            protected_bytes_max,
            reservation: Reservation::Eager,
            in_flight_bytes_max: u64::MAX,
            claims_max: 1 << 16,
        }
    }
}

/// What is to be done, or has come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Protect the object, then bring it in; answer with [`Controller::object_staged`] or
    /// [`Controller::object_failed`]. Its bytes are reserved already.
    Stage(Object),
    /// Nobody holds the object any more: end its protection. It may stay cached.
    Unprotect(Object),
    /// Every object of the claim is ready.
    Ready(ClaimId),
    /// An object of the claim could not be staged; it is released as soon as nothing of it is in flight. Read without
    /// it.
    Failed(ClaimId),
    /// The claim holds nothing any more and is forgotten.
    Released(ClaimId),
}

/// How a retrieval may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retrieval {
    /// Everything is ready and protected until [`Controller::finish_retrieval`].
    Protected,
    /// Nothing is protected: read through the device, as slowly as it delivers. Call
    /// [`Controller::finish_retrieval`] all the same.
    Demand,
    /// It is being staged, or reserved and about to be: wait for [`Effect::Ready`] or [`Effect::Failed`] and call again.
    /// Whoever waits sets a deadline, and past it cancels the claim, or reads it with
    /// [`Controller::retrieve_on_demand`] if its staging has not begun.
    Wait,
}

/// All claims on one device. Pure and single-threaded: it does nothing but keep books and say what to do.
///
/// Guarantees: protected bytes never exceed the budget, they are reserved before any [`Effect::Stage`], and they are
/// given back only when neither I/O nor a retrieval of a holder is under way. A claim that does not fit does not hold
/// up others, so a large one can be overtaken for as long as smaller ones keep coming; it is then retrieved on demand.
pub struct Controller {
    options: ControllerOptions,
    policy: Box<dyn Policy + Send>,
    claims: BTreeMap<ClaimId, Claim>,
    objects: Objects,
    budget: Budget,
    next_id: u64,
    report: Report,
}

impl Controller {
    /// No claims yet.
    pub fn new(options: ControllerOptions, policy: impl Policy + Send + 'static) -> Self {
        let budget = Budget::new(options.protected_bytes_max, 0);
        Self {
            options,
            policy: Box::new(policy),
            claims: BTreeMap::new(),
            objects: Objects::default(),
            budget,
            next_id: 0,
            report: Report::default(),
        }
    }

    /// Notes a hit on `objects`: metadata only. A request without a hit may record none; its claim costs nothing.
    pub fn record(&mut self, objects: &[Object]) -> Result<ClaimId, StagingError> {
        let claims_max = self.options.claims_max;
        if self.claims.len() >= claims_max {
            return Err(StagingError::TooManyClaims { claims_max });
        }
        let id = ClaimId(self.next_id);
        let claim = Claim::new(id, objects);
        self.objects.record(claim.objects())?;
        self.policy.recorded(claim.bytes());
        self.claims.insert(id, claim);
        self.next_id += 1;
        self.report.recorded += 1;
        Ok(id)
    }

    /// The scheduler wants to retrieve `id` now. From the next tick on the claim counts as due.
    pub fn request_retrieval(&mut self, id: ClaimId, now_ns: u64) -> Result<(), StagingError> {
        let claim = self.claims.get_mut(&id).ok_or(StagingError::UnknownClaim { claim: id })?;
        if claim.requested_ns.is_some() {
            return Ok(());
        }
        claim.requested_ns = Some(now_ns);
        if claim.state() == ClaimState::Ready {
            self.report.early += 1;
            self.report.early_ns +=
                u128::from(now_ns.saturating_sub(claim.ready_ns.unwrap_or(now_ns)));
        } else {
            self.report.late += 1;
        }
        Ok(())
    }

    /// Looks at every waiting claim, in the order of its slack (time until use less time until ready) or, if the policy
    /// takes turns, of its use: makes it eligible, commits it, and starts to stage it, as far as policy, budget and bytes
    /// in flight allow.
    ///
    /// Call it when something changed (a claim, a completion, the queue) and every 20 to 500 ms.
    pub fn tick(
        &mut self,
        now_ns: u64,
        time_to_use: &dyn TimeToUse,
        time_to_ready: &dyn TimeToReady,
        effects: &mut Vec<Effect>,
    ) {
        let unread = self.claims.values().filter(|claim| claim.state() <= ClaimState::Ready);
        let mut waiting: Vec<(Outlook, ClaimId)> = unread
            .enumerate()
            .filter(|(_, claim)| claim.state() <= ClaimState::Committed)
            .map(|(ahead, claim)| {
                (self.outlook(claim, ahead, now_ns, time_to_use, time_to_ready), claim.id())
            })
            .collect();
        if self.policy.takes_turns() {
            self.take_turns(&mut waiting, now_ns, time_to_use);
        } else {
            waiting.sort_by_key(|(outlook, id)| (outlook.slack_ns(), *id));
        }
        for (outlook, id) in waiting {
            self.advance(id, &outlook, now_ns, effects);
        }
    }

    /// Begins to retrieve `id`, if it is not coming in just now.
    pub fn begin_retrieval(&mut self, id: ClaimId, now_ns: u64) -> Result<Retrieval, StagingError> {
        self.request_retrieval(id, now_ns)?;
        let claim = self.claim_mut(id)?;
        match claim.state() {
            ClaimState::Staging => Ok(Retrieval::Wait),
            ClaimState::Committed if claim.reserved => Ok(Retrieval::Wait),
            ClaimState::Recorded | ClaimState::Eligible | ClaimState::Committed => {
                claim.apply(Move::RetrieveOnDemand)?;
                self.report.demand += 1;
                Ok(Retrieval::Demand)
            }
            _ => claim.apply(Move::StartRetrieval).map(|_| Retrieval::Protected),
        }
    }

    /// Begins to retrieve `id` without waiting for its turn to be staged. Illegal once staging has begun.
    pub fn retrieve_on_demand(
        &mut self,
        id: ClaimId,
        now_ns: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), StagingError> {
        self.claim_mut(id)?.apply(Move::RetrieveOnDemand)?;
        self.request_retrieval(id, now_ns)?;
        self.report.demand += 1;
        self.unreserve(id, now_ns, effects);
        Ok(())
    }

    /// The accelerator has read all of `id`; it is released.
    pub fn finish_retrieval(
        &mut self,
        id: ClaimId,
        now_ns: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), StagingError> {
        self.claim_mut(id)?.apply(Move::FinishRetrieval)?;
        self.release(id, now_ns, effects);
        Ok(())
    }

    /// Gives `id` up, in any state: at once, or when its I/O or retrieval is done.
    pub fn cancel(
        &mut self,
        id: ClaimId,
        now_ns: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), StagingError> {
        let claim = self.claim_mut(id)?;
        let before = claim.state();
        let after = claim.apply(Move::Cancel)?;
        self.report.cancelled += u64::from(after != before);
        if after == ClaimState::Released {
            self.release(id, now_ns, effects);
        }
        Ok(())
    }

    /// The answer to [`Effect::Stage`]: the object is in fast memory and protected.
    pub fn object_staged(
        &mut self,
        object: ObjectId,
        now_ns: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), StagingError> {
        self.objects.finish(object, true)?;
        self.settle(object, now_ns, effects);
        Ok(())
    }

    /// The answer to [`Effect::Stage`]: the object could not be brought in or protected, and is not protected.
    pub fn object_failed(
        &mut self,
        object: ObjectId,
        now_ns: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), StagingError> {
        self.objects.finish(object, false)?;
        for id in self.naming(object) {
            let claim = self.claim_mut(id)?;
            if claim.state() == ClaimState::Staging {
                claim.apply(Move::FailStaging)?;
                self.report.failed += 1;
                effects.push(Effect::Failed(id));
            }
        }
        self.settle(object, now_ns, effects);
        Ok(())
    }

    /// A living claim.
    pub fn claim(&self, id: ClaimId) -> Option<&Claim> {
        self.claims.get(&id)
    }

    /// Living claims, oldest first.
    pub fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.claims.values()
    }

    /// The budget of protected bytes.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What was done up to `now_ns`.
    pub fn report(&self, now_ns: u64) -> Report {
        let protected_byte_ns = self.budget.integral_byte_ns(now_ns);
        Report { protected_byte_ns, peak_bytes: self.budget.peak_bytes(), ..self.report }
    }

    fn outlook(
        &self,
        claim: &Claim,
        ahead: usize,
        now_ns: u64,
        time_to_use: &dyn TimeToUse,
        time_to_ready: &dyn TimeToReady,
    ) -> Outlook {
        let (cold, in_flight_bytes) = self.objects.need(claim.objects());
        let need = StagingNeed { cold: &cold, in_flight_bytes };
        let time_to_ready_ns = time_to_ready.time_to_ready_ns(&need, now_ns);
        let restage_ns = || {
            let restage = StagingNeed { cold: claim.objects(), in_flight_bytes: 0 };
            // Others brought it in, or are about to.
            cold.is_empty().then(|| time_to_ready.time_to_ready_ns(&restage, now_ns))
        };
        let lead_ns = self.policy.lead_ns(time_to_ready_ns, &restage_ns);
        // What is there already, or coming in, costs no staging.
        let soon_ns = if cold.is_empty() { None } else { self.policy.soon_ns(time_to_ready_ns) };
        let chance = |within_ns| time_to_use.use_chance_permille(claim.id(), within_ns, now_ns);
        Outlook {
            ahead,
            bytes: claim.bytes(),
            time_to_use_ns: time_to_use.time_to_use_ns(claim.id(), now_ns),
            time_to_ready_ns,
            use_chance_permille: lead_ns.and_then(chance),
            soon_chance_permille: soon_ns.and_then(chance),
            late_behind_permille: 0,
            requested: claim.requested_ns.is_some(),
        }
    }

    fn take_turns(
        &self,
        waiting: &mut [(Outlook, ClaimId)],
        now_ns: u64,
        time_to_use: &dyn TimeToUse,
    ) {
        let lacks = |id| {
            let (cold, _) = self.objects.need(self.claims[&id].objects());
            cold.iter().map(|object| object.id).collect()
        };
        let late_permille = |id, ready_ns| {
            let lead_ns = self.policy.lead_ns(ready_ns, &|| None);
            let chance = |lead_ns| time_to_use.use_chance_permille(id, lead_ns, now_ns);
            lead_ns.and_then(chance).unwrap_or(0)
        };
        turns::order(waiting);
        // While nothing can begin there is nothing to hurry for, and what is in flight would count in every turn.
        if self.may_start() {
            turns::tell(waiting, lacks, late_permille);
        }
    }

    /// Takes a waiting claim as far as it gets.
    fn advance(&mut self, id: ClaimId, outlook: &Outlook, now_ns: u64, effects: &mut Vec<Effect>) {
        const LEGAL: &str = "the state was just looked at";
        let eager = self.options.reservation == Reservation::Eager;
        let may_start = self.may_start();
        let claim = self.claims.get_mut(&id).expect("a waiting claim is alive");
        if claim.state() == ClaimState::Recorded && self.policy.is_eligible(outlook) {
            claim.apply(Move::BecomeEligible).expect(LEGAL);
        }
        if claim.state() == ClaimState::Eligible && (may_start || self.policy.commits_ahead()) {
            if eager
                && !reserve(claim, &mut self.objects, &mut self.budget, &mut self.report, now_ns)
            {
                return;
            }
            claim.apply(Move::Commit).expect(LEGAL);
            self.report.committed += 1;
        }
        if claim.state() == ClaimState::Committed && may_start {
            if !eager
                && !reserve(claim, &mut self.objects, &mut self.budget, &mut self.report, now_ns)
            {
                return;
            }
            claim.apply(Move::StartStaging).expect(LEGAL);
            self.objects.start(claim.objects(), effects);
            self.settle_claim(id, now_ns, effects);
        }
    }

    /// Whether the device takes another claim.
    fn may_start(&self) -> bool {
        self.objects.in_flight_bytes() < self.options.in_flight_bytes_max
    }

    /// Moves on the claims that waited for `object`.
    fn settle(&mut self, object: ObjectId, now_ns: u64, effects: &mut Vec<Effect>) {
        for id in self.naming(object) {
            self.settle_claim(id, now_ns, effects);
        }
    }

    fn settle_claim(&mut self, id: ClaimId, now_ns: u64, effects: &mut Vec<Effect>) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        match claim.state() {
            ClaimState::Staging if self.objects.are_ready(claim.objects()) => {
                claim.apply(Move::FinishStaging).expect("it is staging");
                claim.ready_ns = Some(now_ns);
                self.report.ready += 1;
                effects.push(Effect::Ready(id));
            }
            ClaimState::StageDraining if !self.objects.any_in_flight(claim.objects()) => {
                claim.apply(Move::FinishDraining).expect("it is draining");
                self.release(id, now_ns, effects);
            }
            _ => {}
        }
    }

    fn release(&mut self, id: ClaimId, now_ns: u64, effects: &mut Vec<Effect>) {
        self.unreserve(id, now_ns, effects);
        let claim = self.claims.remove(&id).expect("a claim is released once");
        self.objects.forget(claim.objects());
        self.report.released += 1;
        effects.push(Effect::Released(id));
    }

    fn unreserve(&mut self, id: ClaimId, now_ns: u64, effects: &mut Vec<Effect>) {
        let claim = self.claims.get_mut(&id).expect("the claim is alive");
        if std::mem::take(&mut claim.reserved) {
            let freed_bytes = self.objects.release(claim.objects(), effects);
            self.budget.release(freed_bytes, now_ns);
        }
    }

    fn naming(&self, object: ObjectId) -> Vec<ClaimId> {
        let names = |claim: &&Claim| {
            claim.objects().binary_search_by_key(&object, |named| named.id).is_ok()
        };
        self.claims.values().filter(names).map(Claim::id).collect()
    }

    fn claim_mut(&mut self, id: ClaimId) -> Result<&mut Claim, StagingError> {
        self.claims.get_mut(&id).ok_or(StagingError::UnknownClaim { claim: id })
    }
}

/// Reserves the whole claim, or notes that it is blocked.
fn reserve(
    claim: &mut Claim,
    objects: &mut Objects,
    budget: &mut Budget,
    report: &mut Report,
    now_ns: u64,
) -> bool {
    if budget.reserve(objects.unreserved_bytes(claim.objects()), now_ns).is_ok() {
        objects.hold(claim.objects());
        claim.reserved = true;
        return true;
    }
    report.blocked += u64::from(!std::mem::replace(&mut claim.blocked, true));
    false
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("policy", &self.policy.name())
            .field("claims", &self.claims.len())
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}
