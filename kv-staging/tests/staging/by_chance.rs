//! The policy that weighs chances, with a price that follows the claims and a time alone to fall back on.

use std::collections::HashMap;

use kv_staging::{
    ClaimId, Controller, ControllerOptions, Effect, RateModel, RateOptions, StagingNeed,
    TimeToReady, TimeToUse,
    policy::{ByChance, Policy, Tempo, TempoQ},
};

use crate::controller::object;

/// Knows when each claim is used, for certain, and says how likely that is if it shall.
struct Told {
    at_ns: HashMap<ClaimId, u64>,
    knows_chances: bool,
}

impl TimeToUse for Told {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        self.at_ns.get(&claim).map(|at_ns| at_ns.saturating_sub(now_ns))
    }

    fn use_chance_permille(&self, claim: ClaimId, within_ns: u64, now_ns: u64) -> Option<u32> {
        let is_within = self.time_to_use_ns(claim, now_ns)? <= within_ns;
        self.knows_chances.then_some(if is_within { 1000 } else { 0 })
    }
}

/// Everything is in fast memory already, though nobody holds it there.
struct Resident;

impl TimeToReady for Resident {
    fn time_to_ready_ns(&self, _need: &StagingNeed<'_>, _now_ns: u64) -> u64 {
        0
    }
}

fn by_chance(late_price_percent: u32) -> ByChance {
    let by_quantile = Tempo { margin_percent: 25, margin_ns: 7 };
    ByChance::new(TempoQ::default(), by_quantile, late_price_percent)
}

/// Whether the last of the claims is staged at `now_ns`, which are used at 1,000 and take a nanosecond a byte.
fn is_staged(
    policy: impl Policy + Send + 'static,
    claims: &[u64],
    knows_chances: bool,
    now_ns: u64,
) -> bool {
    let mut controller = Controller::new(ControllerOptions::new(10_000), policy);
    let mut told = Told { at_ns: HashMap::new(), knows_chances };
    let objects: Vec<_> = (0..).zip(claims).map(|(id, &bytes)| object(id, bytes)).collect();
    for object in &objects {
        let named = if object.bytes == 0 { &[][..] } else { std::slice::from_ref(object) };
        let claim = controller.record(named).unwrap();
        // Only the last one is used at all.
        told.at_ns.insert(claim, if Some(object) == objects.last() { 1_000 } else { u64::MAX });
    }
    let ready = RateModel::new(RateOptions::new(1_000_000_000));
    let mut effects = Vec::new();
    controller.tick(now_ns, &told, &ready, &mut effects);
    objects.last().is_some_and(|last| effects.contains(&Effect::Stage(*last)))
}

#[test]
fn a_known_chance_decides_without_the_margin_of_a_time() {
    assert!(!is_staged(by_chance(700), &[40], true, 959));
    assert!(is_staged(by_chance(700), &[40], true, 960));
}

#[test]
fn of_a_time_alone_the_margin_decides() {
    // 40 ns, a quarter of them, and 7.
    assert!(!is_staged(by_chance(700), &[40], false, 942));
    assert!(is_staged(by_chance(700), &[40], false, 943));
    // There the price does not count.
    assert!(is_staged(by_chance(0), &[40], false, 943));
}

#[test]
fn the_price_is_in_proportion_to_the_claim_where_all_are_alike() {
    for bytes in [40, 400] {
        assert!(!is_staged(by_chance(99), &[bytes; 3], true, 990 - bytes / 2));
        assert!(is_staged(by_chance(100), &[bytes; 3], true, 990 - bytes / 2));
    }
}

#[test]
fn a_claim_larger_than_usual_has_to_be_worth_more() {
    // 40, and an eighth of the way to 80.
    assert!(!is_staged(by_chance(177), &[40, 80], true, 950));
    assert!(is_staged(by_chance(178), &[40, 80], true, 950));
    // Claims of nothing are not what is usual.
    assert!(is_staged(by_chance(178), &[0, 40, 0, 0, 80], true, 950));
}

#[test]
fn what_is_in_memory_is_kept_there_however_soon_it_is_used() {
    let stages = |policy: Box<dyn FnOnce(ControllerOptions) -> Controller>| {
        let mut controller = policy(ControllerOptions::new(100));
        let claim = controller.record(&[object(1, 40)]).unwrap();
        let told = Told { at_ns: HashMap::from([(claim, 1_000)]), knows_chances: true };
        let mut effects = Vec::new();
        controller.tick(1_000, &told, &Resident, &mut effects);
        !effects.is_empty()
    };
    assert!(stages(Box::new(|options| Controller::new(options, by_chance(700)))));
    assert!(!stages(Box::new(|options| Controller::new(options, TempoQ::default()))));
}

#[test]
fn a_requested_claim_is_eligible_whatever_its_price() {
    for knows_chances in [false, true] {
        let mut controller = Controller::new(ControllerOptions::new(100), by_chance(0));
        let claim = controller.record(&[object(1, 40)]).unwrap();
        let told = Told { at_ns: HashMap::from([(claim, 1_000)]), knows_chances };
        let ready = RateModel::new(RateOptions::new(1_000_000_000));
        let mut effects = Vec::new();
        controller.request_retrieval(claim, 0).unwrap();
        controller.tick(0, &told, &ready, &mut effects);
        assert_eq!(effects, [Effect::Stage(object(1, 40))]);
    }
}
