//! The controller's rules, one test each.

use std::collections::HashMap;

use kv_staging::{
    ClaimId, ClaimState, Controller, ControllerOptions, Effect, Object, ObjectId, Reservation,
    Retrieval, StagingError, StagingNeed, TimeToReady, TimeToUse,
    policy::{Demand, Immediate, Policy, QueueDepth, Static, Tempo, TempoQ},
};

/// What the test says.
#[derive(Default)]
struct Said(HashMap<ClaimId, u64>);

impl TimeToUse for Said {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        self.0.get(&claim).map(|at_ns| at_ns.saturating_sub(now_ns))
    }
}

/// One nanosecond a byte.
struct Nanosecond;

impl TimeToReady for Nanosecond {
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, _now_ns: u64) -> u64 {
        need.in_flight_bytes + need.cold.iter().map(|object| object.bytes).sum::<u64>()
    }
}

const TEMPO: Tempo = Tempo { margin_percent: 0, margin_ns: 0 };

pub(crate) fn object(id: u128, bytes: u64) -> Object {
    Object { id: ObjectId(id), bytes }
}

pub(crate) struct Bench {
    pub(crate) controller: Controller,
    uses: Said,
    pub(crate) effects: Vec<Effect>,
}

impl Bench {
    pub(crate) fn new(
        policy: impl Policy + Send + 'static,
        change: impl FnOnce(&mut ControllerOptions),
    ) -> Self {
        let mut options = ControllerOptions::new(100);
        change(&mut options);
        Self {
            controller: Controller::new(options, policy),
            uses: Said::default(),
            effects: Vec::new(),
        }
    }

    pub(crate) fn record(&mut self, objects: &[Object], use_ns: u64) -> ClaimId {
        let id = self.controller.record(objects).unwrap();
        self.uses.0.insert(id, use_ns);
        id
    }

    /// The effects of a tick.
    pub(crate) fn tick(&mut self, now_ns: u64) -> Vec<Effect> {
        self.controller.tick(now_ns, &self.uses, &Nanosecond, &mut self.effects);
        std::mem::take(&mut self.effects)
    }

    pub(crate) fn staged(&mut self, id: u128, now_ns: u64) -> Vec<Effect> {
        self.controller.object_staged(ObjectId(id), now_ns, &mut self.effects).unwrap();
        std::mem::take(&mut self.effects)
    }

    pub(crate) fn state(&self, id: ClaimId) -> Option<ClaimState> {
        self.controller.claim(id).map(kv_staging::Claim::state)
    }
}

#[test]
fn a_claim_waits_until_its_use_is_as_near_as_its_readiness() {
    let mut bench = Bench::new(TEMPO, |_| ());
    let prefix = object(1, 40);
    let claim = bench.record(&[prefix], 1_000);
    assert_eq!(bench.tick(959), []);
    assert_eq!(
        (bench.state(claim), bench.controller.budget().protected_bytes()),
        (Some(ClaimState::Recorded), 0)
    );
    assert_eq!(bench.tick(960), [Effect::Stage(prefix)]);
    assert_eq!(bench.staged(1, 1_000), [Effect::Ready(claim)]);
    assert_eq!(bench.controller.begin_retrieval(claim, 1_010), Ok(Retrieval::Protected));
    bench.controller.finish_retrieval(claim, 1_050, &mut bench.effects).unwrap();
    assert_eq!(bench.effects, [Effect::Unprotect(prefix), Effect::Released(claim)]);
    let report = bench.controller.report(2_000);
    assert_eq!(report.protected_byte_ns, 40 * (1_050 - 960));
    assert_eq!((report.early, report.early_ns, report.late, report.blocked), (1, 10, 0, 0));
}

#[test]
fn a_requested_claim_is_eligible_whatever_its_estimate() {
    let mut bench = Bench::new(TEMPO, |_| ());
    let claim = bench.record(&[object(1, 40)], 1_000_000);
    assert_eq!(bench.tick(0), []);
    bench.controller.request_retrieval(claim, 5).unwrap();
    assert_eq!(bench.tick(5), [Effect::Stage(object(1, 40))]);
    assert_eq!(bench.controller.begin_retrieval(claim, 6), Ok(Retrieval::Wait));
    bench.staged(1, 45);
    assert_eq!(bench.controller.begin_retrieval(claim, 45), Ok(Retrieval::Protected));
    assert_eq!(bench.controller.report(45).late, 1);
}

#[test]
fn claims_are_committed_in_the_order_of_their_slack() {
    let mut bench = Bench::new(Immediate, |_| ());
    let relaxed = bench.record(&[object(1, 10)], 500); // 490 to spare
    let large = bench.record(&[object(2, 60)], 300); // 240
    let soon = bench.record(&[object(3, 10)], 100); // 90
    let unknown = bench.controller.record(&[object(4, 10)]).unwrap();
    let expected = [object(3, 10), object(2, 60), object(1, 10), object(4, 10)].map(Effect::Stage);
    assert_eq!(bench.tick(0), expected);
    for id in [relaxed, large, soon, unknown] {
        assert_eq!(bench.state(id), Some(ClaimState::Staging));
    }
}

#[test]
fn a_blocked_claim_does_not_block_others_and_is_read_on_demand() {
    let mut bench = Bench::new(Immediate, |_| ());
    let first = bench.record(&[object(1, 60)], 10);
    let blocked = bench.record(&[object(2, 60)], 20);
    let small = bench.record(&[object(3, 40)], 1_000);
    assert_eq!(bench.tick(0), [Effect::Stage(object(1, 60)), Effect::Stage(object(3, 40))]);
    assert_eq!(bench.state(blocked), Some(ClaimState::Eligible));
    bench.tick(1);
    assert_eq!(bench.controller.report(1).blocked, 1);
    assert_eq!(bench.controller.begin_retrieval(blocked, 2), Ok(Retrieval::Demand));
    bench.controller.finish_retrieval(blocked, 3, &mut bench.effects).unwrap();
    assert_eq!(bench.effects, [Effect::Released(blocked)]);
    assert_eq!(bench.controller.report(3).demand, 1);
    for id in [first, small] {
        assert_eq!(bench.state(id), Some(ClaimState::Staging));
    }
}

#[test]
fn a_freed_budget_goes_to_the_claim_that_was_blocked() {
    let mut bench = Bench::new(Immediate, |_| ());
    let first = bench.record(&[object(1, 60)], 10);
    bench.record(&[object(2, 60)], 20);
    bench.tick(0);
    bench.staged(1, 60);
    bench.controller.cancel(first, 61, &mut bench.effects).unwrap();
    bench.effects.clear();
    assert_eq!(bench.tick(61), [Effect::Stage(object(2, 60))]);
}

#[test]
fn a_shared_object_is_staged_reserved_and_protected_once() {
    let mut bench = Bench::new(Immediate, |_| ());
    let (shared, own) = (object(1, 60), object(2, 30));
    let one = bench.record(&[shared], 10);
    let two = bench.record(&[shared, own], 20);
    assert_eq!(bench.tick(0), [Effect::Stage(shared), Effect::Stage(own)]);
    assert_eq!(bench.controller.budget().protected_bytes(), 90);
    assert_eq!(bench.staged(1, 60), [Effect::Ready(one)]);
    assert_eq!(bench.staged(2, 90), [Effect::Ready(two)]);
    bench.controller.cancel(one, 91, &mut bench.effects).unwrap();
    assert_eq!(bench.effects, [Effect::Released(one)]);
    assert_eq!(bench.controller.budget().protected_bytes(), 90);
    bench.effects.clear();
    bench.controller.cancel(two, 92, &mut bench.effects).unwrap();
    assert_eq!(
        bench.effects,
        [Effect::Unprotect(shared), Effect::Unprotect(own), Effect::Released(two)]
    );
    assert_eq!(bench.controller.budget().protected_bytes(), 0);
}

#[test]
fn eager_counts_from_commitment_and_lazy_from_the_first_staged_byte() {
    for (reservation, waiting_bytes) in [(Reservation::Eager, 80), (Reservation::Lazy, 40)] {
        let mut bench = Bench::new(Immediate, |options| {
            options.reservation = reservation;
            options.in_flight_bytes_max = 1;
        });
        bench.record(&[object(1, 40)], 10);
        let second = bench.record(&[object(2, 40)], 20);
        assert_eq!(bench.tick(0), [Effect::Stage(object(1, 40))]);
        assert_eq!(bench.state(second), Some(ClaimState::Committed));
        assert_eq!(bench.controller.budget().protected_bytes(), waiting_bytes);
        bench.staged(1, 40);
        assert_eq!(bench.tick(40), [Effect::Stage(object(2, 40))]);
        assert_eq!(bench.controller.budget().protected_bytes(), 80);
        assert_eq!(bench.controller.report(40).protected_byte_ns, 40 * u128::from(waiting_bytes));
    }
}

#[test]
fn a_committed_claim_without_protection_is_read_on_demand() {
    let mut bench = Bench::new(Immediate, |options| {
        options.reservation = Reservation::Lazy;
        options.in_flight_bytes_max = 1;
    });
    bench.record(&[object(1, 40)], 10);
    let second = bench.record(&[object(2, 40)], 20);
    bench.tick(0);
    assert_eq!(bench.controller.begin_retrieval(second, 1), Ok(Retrieval::Demand));
}

#[test]
fn waiting_for_its_turn_can_be_given_up_for_the_demand_path() {
    let mut bench = Bench::new(Immediate, |options| options.in_flight_bytes_max = 1);
    let first = bench.record(&[object(1, 40)], 10);
    let second = bench.record(&[object(2, 40)], 20);
    bench.tick(0);
    assert_eq!(bench.controller.begin_retrieval(second, 1), Ok(Retrieval::Wait));
    bench.controller.retrieve_on_demand(second, 2, &mut bench.effects).unwrap();
    assert_eq!(bench.controller.budget().protected_bytes(), 40);
    let refused = bench.controller.retrieve_on_demand(first, 2, &mut bench.effects);
    assert!(matches!(refused, Err(StagingError::IllegalMove { state: ClaimState::Staging, .. })));
}

#[test]
fn cancelling_keeps_protection_until_the_io_has_drained() {
    let mut bench = Bench::new(Immediate, |_| ());
    let claim = bench.record(&[object(1, 40), object(2, 40)], 10);
    bench.tick(0);
    bench.staged(1, 40);
    bench.controller.cancel(claim, 50, &mut bench.effects).unwrap();
    assert_eq!((bench.effects.len(), bench.state(claim)), (0, Some(ClaimState::StageDraining)));
    assert_eq!(bench.controller.budget().protected_bytes(), 80);
    let effects = bench.staged(2, 80);
    let expected = [
        Effect::Unprotect(object(1, 40)),
        Effect::Unprotect(object(2, 40)),
        Effect::Released(claim),
    ];
    assert_eq!(effects, expected);
    assert_eq!(bench.controller.report(100).protected_byte_ns, 80 * 80);
}

#[test]
fn cancelling_keeps_protection_until_the_accelerator_is_done() {
    let mut bench = Bench::new(Immediate, |_| ());
    let claim = bench.record(&[object(1, 40)], 10);
    bench.tick(0);
    bench.staged(1, 40);
    bench.controller.begin_retrieval(claim, 41).unwrap();
    bench.controller.cancel(claim, 42, &mut bench.effects).unwrap();
    assert_eq!(bench.controller.budget().protected_bytes(), 40);
    bench.controller.finish_retrieval(claim, 43, &mut bench.effects).unwrap();
    assert_eq!(bench.controller.budget().protected_bytes(), 0);
}

#[test]
fn a_failed_object_fails_every_claim_that_waits_for_it() {
    let mut bench = Bench::new(Immediate, |_| ());
    let one = bench.record(&[object(1, 40)], 10);
    let two = bench.record(&[object(1, 40), object(2, 40)], 20);
    bench.tick(0);
    bench.controller.object_failed(ObjectId(1), 5, &mut bench.effects).unwrap();
    assert_eq!(bench.effects, [Effect::Failed(one), Effect::Failed(two), Effect::Released(one)]);
    assert_eq!(bench.controller.budget().protected_bytes(), 80, "object 2 is still coming in");
    bench.effects.clear();
    assert_eq!(bench.staged(2, 40), [Effect::Unprotect(object(2, 40)), Effect::Released(two)]);
    assert_eq!(
        (bench.controller.report(40).failed, bench.controller.budget().protected_bytes()),
        (2, 0)
    );
}

#[test]
fn demand_never_protects() {
    let mut bench = Bench::new(Demand, |_| ());
    let claim = bench.record(&[object(1, 40)], 0);
    bench.controller.request_retrieval(claim, 0).unwrap();
    assert_eq!(bench.tick(0), []);
    assert_eq!(bench.controller.begin_retrieval(claim, 1), Ok(Retrieval::Demand));
}

#[test]
fn queue_depth_protects_the_oldest_whose_retrieval_has_not_begun() {
    let mut bench = Bench::new(QueueDepth { claims: 2 }, |_| ());
    let claims: Vec<ClaimId> =
        (1..=4).map(|id| bench.record(&[object(id, 10)], 1_000_000)).collect();
    assert_eq!(bench.tick(0), [object(1, 10), object(2, 10)].map(Effect::Stage));
    bench.staged(1, 10);
    bench.controller.begin_retrieval(claims[0], 11).unwrap();
    assert_eq!(bench.tick(11), [Effect::Stage(object(3, 10))]);
}

#[test]
fn static_leads_by_a_nominal_rate() {
    let mut bench = Bench::new(Static { bytes_per_s: 500_000_000, lead_ns: 3 }, |_| ());
    bench.record(&[object(1, 40)], 1_000); // 80 ns at half a byte a nanosecond
    assert_eq!(bench.tick(916), []);
    assert_eq!(bench.tick(917), [Effect::Stage(object(1, 40))]);
}

#[test]
fn tempos_margin_leads_its_estimate() {
    let mut bench = Bench::new(Tempo { margin_percent: 25, margin_ns: 7 }, |_| ());
    bench.record(&[object(1, 40)], 1_000);
    assert_eq!(bench.tick(942), []);
    assert_eq!(bench.tick(943), [Effect::Stage(object(1, 40))]);
}

fn tempo_q(late_price_bytes: u64) -> TempoQ {
    TempoQ {
        late_price_bytes,
        margin_percent: 0,
        margin_ns: 0,
        hold_percent: 200,
        soon_percent: 25,
    }
}

#[test]
fn tempo_q_protects_when_the_chance_of_lateness_is_worth_it() {
    // An estimator of one figure is certain: what cannot be worth it waits until it is requested.
    for (price, staged) in [(39, false), (40, true)] {
        let mut bench = Bench::new(tempo_q(price), |_| ());
        bench.record(&[object(1, 40)], 1_000);
        assert_eq!(bench.tick(959), []);
        assert_eq!(!bench.tick(960).is_empty(), staged);
    }
}

#[test]
fn tempo_q_begins_in_time_for_those_that_are_staged_afterwards() {
    // Together they take 40 + 80 ns and the second is used at 1,000: the first begins at 880, for its own sake at 940.
    let mut bench = Bench::new(tempo_q(40), |options| options.in_flight_bytes_max = 1);
    bench.record(&[object(1, 40)], 980);
    bench.record(&[object(2, 80)], 1_000);
    assert_eq!(bench.tick(879), []);
    assert_eq!(bench.tick(880), [Effect::Stage(object(1, 40))]);
    // What they share is staged once, so nobody has to hurry for it.
    let mut bench = Bench::new(tempo_q(40), |options| options.in_flight_bytes_max = 1);
    bench.record(&[object(1, 40)], 980);
    bench.record(&[object(1, 40)], 981);
    assert_eq!(bench.tick(939), []);
    assert_eq!(bench.tick(940), [Effect::Stage(object(1, 40))]);
}

#[test]
fn tempo_q_stages_in_the_order_of_use_also_if_the_later_one_is_larger() {
    let mut bench = Bench::new(tempo_q(1_000), |options| options.in_flight_bytes_max = 1);
    bench.record(&[object(1, 90)], 100);
    bench.record(&[object(2, 20)], 60);
    assert_eq!(bench.tick(0), [Effect::Stage(object(2, 20))]);
}

#[test]
fn tempo_q_leaves_to_a_read_on_demand_what_is_used_before_staging_could_help() {
    // A quarter of 40 ns before its use.
    for (now_ns, staged) in [(989, true), (990, false)] {
        let mut bench = Bench::new(tempo_q(1_000), |_| ());
        let claim = bench.record(&[object(1, 40)], 1_000);
        assert_eq!(!bench.tick(now_ns).is_empty(), staged);
        if !staged {
            assert_eq!(bench.controller.begin_retrieval(claim, 1_000), Ok(Retrieval::Demand));
        }
    }
}

#[test]
fn tempo_q_commits_no_sooner_than_the_device_is_free() {
    let mut bench = Bench::new(tempo_q(1_000), |options| options.in_flight_bytes_max = 1);
    bench.record(&[object(1, 40)], 30);
    let second = bench.record(&[object(2, 40)], 35);
    assert_eq!(bench.tick(0), [Effect::Stage(object(1, 40))]);
    assert_eq!(bench.state(second), Some(ClaimState::Eligible));
    assert_eq!(bench.controller.budget().protected_bytes(), 40);
    bench.staged(1, 40);
    assert_eq!(bench.tick(40), [Effect::Stage(object(2, 40))]);
}

#[test]
fn tempo_q_holds_on_to_what_it_would_have_to_bring_in_again() {
    let mut bench = Bench::new(tempo_q(1_000), |_| ());
    let first = bench.record(&[object(1, 40)], 30);
    bench.tick(0);
    bench.staged(1, 40);
    // Ready, and wanted again in more and in less than twice the 40 ns that staging takes.
    let relaxed = bench.record(&[object(1, 40)], 200);
    bench.tick(119);
    assert_eq!(bench.state(relaxed), Some(ClaimState::Recorded));
    bench.tick(120);
    assert_eq!(bench.state(relaxed), Some(ClaimState::Ready));
    bench.controller.cancel(first, 130, &mut bench.effects).unwrap();
    assert_eq!(bench.effects, [Effect::Released(first)]);
}

#[test]
fn wrong_calls_are_refused() {
    let mut bench = Bench::new(Immediate, |options| options.claims_max = 2);
    bench.record(&[object(1, 40)], 10);
    let size = StagingError::ObjectSize { object: ObjectId(1), recorded: 40, given: 41 };
    assert_eq!(bench.controller.record(&[object(2, 1), object(1, 41)]), Err(size));
    let claim = bench.record(&[object(2, 40)], 10);
    assert_eq!(bench.controller.record(&[]), Err(StagingError::TooManyClaims { claims_max: 2 }));
    let not_in_flight = Err(StagingError::NotInFlight { object: ObjectId(1) });
    assert_eq!(bench.controller.object_staged(ObjectId(1), 0, &mut bench.effects), not_in_flight);
    bench.controller.cancel(claim, 0, &mut bench.effects).unwrap();
    assert_eq!(
        bench.controller.begin_retrieval(claim, 0),
        Err(StagingError::UnknownClaim { claim })
    );
}
