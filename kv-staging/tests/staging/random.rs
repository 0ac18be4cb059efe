//! Random runs of the controller against a device that believes nothing: after every call the books must add up.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
};

use kv_staging::{
    ClaimId, ClaimState, Controller, ControllerOptions, Effect, Object, ObjectId, Reservation,
    StagingNeed, TimeToReady, TimeToUse,
    policy::{ByChance, Immediate, QueueDepth, Tempo, TempoQ},
};
use proptest::{collection::vec, prelude::*, sample::Index};

const CAPACITY: u64 = 100;

#[derive(Clone, Debug)]
enum Step {
    Record(Vec<u8>),
    Request(Index),
    Tick,
    Begin(Index),
    OnDemand(Index),
    Finish(Index),
    Cancel(Index),
    Staged(Index),
    Failed(Index),
}

fn any_step() -> impl Strategy<Value = (u64, Step)> {
    let step = prop_oneof![
        3 => vec(0..12_u8, 0..5).prop_map(Step::Record),
        1 => any::<Index>().prop_map(Step::Request),
        4 => Just(Step::Tick),
        2 => any::<Index>().prop_map(Step::Begin),
        1 => any::<Index>().prop_map(Step::OnDemand),
        2 => any::<Index>().prop_map(Step::Finish),
        2 => any::<Index>().prop_map(Step::Cancel),
        4 => any::<Index>().prop_map(Step::Staged),
        1 => any::<Index>().prop_map(Step::Failed),
    ];
    (0..50_u64, step)
}

/// An object's size follows from its id, so that claims agree.
fn object(id: u8) -> Object {
    Object { id: ObjectId(id.into()), bytes: 1 + u64::from(id) * 7 % 40 }
}

struct Estimates;

impl TimeToUse for Estimates {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        (!claim.0.is_multiple_of(5)).then(|| (claim.0 * 37 % 300).saturating_sub(now_ns % 300))
    }
}

impl TimeToReady for Estimates {
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, _now_ns: u64) -> u64 {
        need.in_flight_bytes + need.cold.iter().map(|object| object.bytes).sum::<u64>()
    }
}

/// The controller, and what a device and an engine see of it.
struct Run {
    controller: Controller,
    in_flight: BTreeSet<ObjectId>,
    protected: BTreeMap<ObjectId, u64>,
    integral: u128,
    now_ns: u64,
}

impl Run {
    fn new(policy: u8, lazy: bool, narrow: bool) -> Self {
        let mut options = ControllerOptions::new(CAPACITY);
        options.reservation = if lazy { Reservation::Lazy } else { Reservation::Eager };
        options.in_flight_bytes_max = if narrow { 20 } else { u64::MAX };
        let controller = match policy {
            0 => Controller::new(options, Immediate),
            1 => Controller::new(options, QueueDepth { claims: 2 }),
            2 => Controller::new(options, Tempo { margin_percent: 0, margin_ns: 0 }),
            3 => {
                let tempo = Tempo { margin_percent: 0, margin_ns: 0 };
                Controller::new(options, ByChance::new(TempoQ::default(), tempo, 200))
            }
            _ => Controller::new(options, TempoQ { late_price_bytes: 20, ..TempoQ::default() }),
        };
        Self {
            controller,
            in_flight: BTreeSet::new(),
            protected: BTreeMap::new(),
            integral: 0,
            now_ns: 0,
        }
    }

    fn pick(&self, index: &Index) -> Option<ClaimId> {
        let ids: Vec<ClaimId> = self.controller.claims().map(kv_staging::Claim::id).collect();
        (!ids.is_empty()).then(|| *index.get(&ids))
    }

    fn wait(&mut self, wait_ns: u64) {
        self.integral +=
            u128::from(self.controller.budget().protected_bytes()) * u128::from(wait_ns);
        self.now_ns += wait_ns;
    }

    /// Illegal calls are part of the test: they must be refused without harm.
    fn step(&mut self, step: &Step) {
        let (now_ns, mut effects) = (self.now_ns, Vec::new());
        match step {
            Step::Record(ids) => {
                let objects: Vec<Object> = ids.iter().copied().map(object).collect();
                self.controller.record(&objects).unwrap();
            }
            Step::Tick => self.controller.tick(now_ns, &Estimates, &Estimates, &mut effects),
            Step::Staged(index) | Step::Failed(index) if !self.in_flight.is_empty() => {
                let ids: Vec<ObjectId> = self.in_flight.iter().copied().collect();
                let id = *index.get(&ids);
                self.in_flight.remove(&id);
                if matches!(step, Step::Staged(_)) {
                    self.controller.object_staged(id, now_ns, &mut effects).unwrap();
                } else {
                    self.protected.remove(&id);
                    self.controller.object_failed(id, now_ns, &mut effects).unwrap();
                }
            }
            Step::Staged(_) | Step::Failed(_) => {}
            Step::Request(index) => {
                let _ = self.pick(index).map(|id| self.controller.request_retrieval(id, now_ns));
            }
            Step::Begin(index) => {
                let _ = self.pick(index).map(|id| self.controller.begin_retrieval(id, now_ns));
            }
            Step::OnDemand(index) => {
                let picked = self.pick(index);
                let _ =
                    picked.map(|id| self.controller.retrieve_on_demand(id, now_ns, &mut effects));
            }
            Step::Finish(index) => {
                let picked = self.pick(index);
                let _ = picked.map(|id| self.controller.finish_retrieval(id, now_ns, &mut effects));
            }
            Step::Cancel(index) => {
                if let Some(id) = self.pick(index) {
                    self.controller.cancel(id, now_ns, &mut effects).unwrap();
                }
            }
        }
        effects.into_iter().for_each(|effect| self.perform(effect));
        self.check();
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Stage(object) => {
                assert!(self.in_flight.insert(object.id), "staged twice at once");
                assert_eq!(
                    self.protected.insert(object.id, object.bytes),
                    None,
                    "staged though protected"
                );
            }
            Effect::Unprotect(object) => {
                assert!(
                    !self.in_flight.contains(&object.id),
                    "protection ends after what is in flight"
                );
                assert_eq!(
                    self.protected.remove(&object.id),
                    Some(object.bytes),
                    "unprotected twice"
                );
            }
            Effect::Released(id) => assert!(self.controller.claim(id).is_none()),
            Effect::Ready(id) => {
                let claim = self.controller.claim(id).unwrap();
                assert!(
                    claim.objects().iter().all(|object| self.protected.contains_key(&object.id))
                );
            }
            Effect::Failed(_) => {}
        }
    }

    fn check(&self) {
        let budget = self.controller.budget();
        assert!(budget.protected_bytes() <= CAPACITY);
        let reserved = self.controller.claims().filter(|claim| claim.is_reserved());
        let held: BTreeMap<ObjectId, u64> = reserved
            .flat_map(|claim| claim.objects())
            .map(|object| (object.id, object.bytes))
            .collect();
        assert_eq!(
            budget.protected_bytes(),
            held.values().sum::<u64>(),
            "each held object counts once"
        );
        assert_eq!(budget.integral_byte_ns(self.now_ns), self.integral, "C is exact");
        assert!(
            self.protected.keys().all(|id| held.contains_key(id)),
            "nothing is protected for nobody"
        );
        for claim in self.controller.claims() {
            let reading = claim.state() == ClaimState::Retrieving && claim.is_reserved();
            if reading || claim.state() == ClaimState::Ready {
                let whole =
                    claim.objects().iter().all(|object| self.protected.contains_key(&object.id));
                assert!(whole, "a ready claim keeps its protection");
            }
            let bare = matches!(claim.state(), ClaimState::Recorded | ClaimState::Eligible);
            assert!(!(bare && claim.is_reserved()), "a hit alone costs nothing");
        }
    }

    /// Cancels everything and lets the device and the accelerator finish.
    fn wind_down(&mut self) {
        let ids: Vec<ClaimId> = self.controller.claims().map(kv_staging::Claim::id).collect();
        let mut effects = Vec::new();
        for &id in &ids {
            self.controller.cancel(id, self.now_ns, &mut effects).unwrap();
        }
        effects.drain(..).for_each(|effect| self.perform(effect));
        while let Some(id) = self.in_flight.pop_first() {
            self.controller.object_staged(id, self.now_ns, &mut effects).unwrap();
            effects.drain(..).for_each(|effect| self.perform(effect));
        }
        for id in ids {
            let _ = self.controller.finish_retrieval(id, self.now_ns, &mut effects);
        }
        effects.into_iter().for_each(|effect| self.perform(effect));
        self.check();
    }
}

/// Random runs of each property.
fn sequences() -> u32 {
    env::var("KVBRAID_SEQUENCES").map_or(1_000, |text| text.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(sequences()))]

    #[test]
    fn the_books_add_up_whatever_happens(
        policy in 0..5_u8,
        lazy: bool,
        narrow: bool,
        steps in vec(any_step(), 0..120),
    ) {
        let mut run = Run::new(policy, lazy, narrow);
        for (wait_ns, step) in &steps {
            run.wait(*wait_ns);
            run.step(step);
        }
        run.wind_down();
        prop_assert_eq!(run.controller.claims().count(), 0);
        prop_assert_eq!(run.controller.budget().protected_bytes(), 0);
        prop_assert!(run.protected.is_empty());
        let report = run.controller.report(run.now_ns);
        prop_assert_eq!(report.recorded, report.released);
        // Nothing is left behind that would keep the next claim out.
        let all = Object { id: ObjectId(1_000), bytes: CAPACITY };
        let id = run.controller.record(&[all]).unwrap();
        run.controller.request_retrieval(id, run.now_ns).unwrap();
        run.step(&Step::Tick);
        prop_assert!(run.in_flight.contains(&all.id));
    }

    /// With claims that each fit, every one becomes ready in the end, whatever they share and however they are
    /// reserved: no two wait for each other.
    #[test]
    fn claims_that_fit_all_become_ready(lazy: bool, narrow: bool, claims in vec(vec(0..12_u8, 1..3), 1..12)) {
        let mut run = Run::new(0, lazy, narrow);
        for ids in &claims {
            run.step(&Step::Record(ids.clone()));
        }
        let mut served = 0;
        for _ in 0..4 * claims.len() {
            run.step(&Step::Tick);
            while let Some(id) = run.in_flight.first().copied() {
                run.in_flight.remove(&id);
                let mut effects = Vec::new();
                run.controller.object_staged(id, run.now_ns, &mut effects).unwrap();
                effects.into_iter().for_each(|effect| run.perform(effect));
            }
            let ready = run.controller.claims().filter(|claim| claim.state() == ClaimState::Ready);
            let ready: Vec<ClaimId> = ready.map(kv_staging::Claim::id).collect();
            for id in ready {
                let mut effects = Vec::new();
                run.controller.begin_retrieval(id, run.now_ns).unwrap();
                run.controller.finish_retrieval(id, run.now_ns, &mut effects).unwrap();
                effects.into_iter().for_each(|effect| run.perform(effect));
                served += 1;
            }
        }
        prop_assert_eq!(served, claims.len());
    }
}
