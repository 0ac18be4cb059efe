//! Time until use and time until ready.

use kv_staging::{
    ClaimId, Object, ObjectId, ProjectionOptions, RateModel, RateOptions, SlotProjection,
    StagingNeed, TimeToReady, TimeToUse,
};
use proptest::{collection::vec, prelude::*};

const S: u64 = 1_000_000_000;
const GIB: u64 = 1 << 30;

/// A projection that has seen `services` finish, and nothing else.
fn trained(slots: usize, services: &[u64]) -> SlotProjection {
    let mut uses = SlotProjection::new(ProjectionOptions::new(slots));
    for (i, &service_ns) in services.iter().enumerate() {
        let id = ClaimId(1_000_000 + i as u64);
        uses.enqueue(id, 0);
        uses.start(id, 0);
        uses.finish(id, service_ns);
    }
    uses
}

fn enqueue(uses: &mut SlotProjection, ids: std::ops::Range<u64>, known_ns: u64) {
    ids.for_each(|id| uses.enqueue(ClaimId(id), known_ns));
}

#[test]
fn a_free_slot_means_now_and_an_unknown_request_means_nothing() {
    let mut uses = trained(2, &[10 * S]);
    enqueue(&mut uses, 0..3, S);
    uses.start(ClaimId(0), 0);
    assert_eq!(uses.time_to_use_ns(ClaimId(0), 0), Some(0));
    assert_eq!(uses.time_to_use_ns(ClaimId(1), 0), Some(0));
    assert_eq!(uses.time_to_use_ns(ClaimId(2), 0), Some(11 * S));
    assert_eq!(uses.time_to_use_ns(ClaimId(9), 0), None);
    uses.remove(ClaimId(1));
    assert_eq!(uses.time_to_use_ns(ClaimId(2), 0), Some(0));
}

#[test]
fn running_and_queued_work_stand_on_one_timeline() {
    // Two slots, every request 2 s known + 8 s learnt.
    let mut uses = trained(2, &[8 * S]);
    enqueue(&mut uses, 0..6, 2 * S);
    uses.start(ClaimId(0), 0);
    uses.start(ClaimId(1), 4 * S);
    let at = |id, now_s: u64| uses.time_to_use_ns(ClaimId(id), now_s * S).map(|ns| ns / S);
    assert_eq!(at(2, 5), Some(5)); // slot of 0 at 10
    assert_eq!(at(3, 5), Some(9)); // slot of 1 at 14
    assert_eq!(at(4, 5), Some(15)); // slot of 2 at 20
    assert_eq!(at(5, 5), Some(19));
    assert_eq!(at(2, 30), Some(0)); // 0 is older than anything seen: any moment
}

#[test]
fn before_anything_is_learnt_the_estimate_is_early() {
    let mut uses = trained(1, &[]);
    enqueue(&mut uses, 0..2, 3 * S);
    uses.start(ClaimId(0), 0);
    assert_eq!(uses.time_to_use_ns(ClaimId(1), S), Some(2 * S));
}

#[test]
fn the_first_of_many_slots_is_asked_for_and_not_the_mean() {
    let services: Vec<u64> = (1..=100).map(|i| i * S / 5).collect(); // mean 10 s
    let mut uses = trained(8, &services);
    enqueue(&mut uses, 0..9, 0);
    (0..8).for_each(|id| uses.start(ClaimId(id), 0));
    let ttu_ns = uses.time_to_use_ns(ClaimId(8), 0).unwrap();
    assert!(ttu_ns < 4 * S, "{ttu_ns}");
}

#[test]
fn old_requests_are_forgotten() {
    let mut options = ProjectionOptions::new(1);
    options.history_len = 2;
    let mut uses = SlotProjection::new(options);
    for (id, service_ns) in [(0, 100 * S), (1, S), (2, S)] {
        uses.enqueue(ClaimId(id), 0);
        uses.start(ClaimId(id), 0);
        uses.finish(ClaimId(id), service_ns);
    }
    enqueue(&mut uses, 3..5, 0);
    uses.start(ClaimId(3), 0);
    assert_eq!(uses.time_to_use_ns(ClaimId(4), 0), Some(S));
}

proptest! {
    #[test]
    fn whoever_queues_later_is_used_later(
        services in vec(1..100 * S, 1..40),
        slots in 1..6_usize,
        known in vec(0..5 * S, 12),
        now_ns in 0..20 * S,
    ) {
        let mut uses = trained(slots, &services);
        known.iter().enumerate().for_each(|(id, &known_ns)| uses.enqueue(ClaimId(id as u64), known_ns));
        (0..slots as u64).for_each(|id| uses.start(ClaimId(id), 0));
        let times: Vec<u64> =
            (slots as u64..12).map(|id| uses.time_to_use_ns(ClaimId(id), now_ns).unwrap()).collect();
        prop_assert!(times.is_sorted());
        let again: Vec<u64> =
            (slots as u64..12).map(|id| uses.time_to_use_ns(ClaimId(id), now_ns).unwrap()).collect();
        prop_assert_eq!(times, again);
    }

    #[test]
    fn a_measured_rate_is_the_devices(rate_mib_s in 100..20_000_u64, chunk_mib in 1..64_u64, initial in 1..50 * GIB) {
        let mut ready = RateModel::new(RateOptions::new(initial));
        let chunk_bytes = chunk_mib << 20;
        let chunk_ns = chunk_mib * S / rate_mib_s;
        let mut now_ns = 0;
        ready.submitted(chunk_bytes * 2, now_ns);
        // Long enough for 40 samples of 50 ms or more, two chunks in flight throughout.
        while now_ns < 100 * chunk_ns.max(60_000_000) {
            now_ns += chunk_ns;
            ready.completed(chunk_bytes, now_ns);
            ready.submitted(chunk_bytes, now_ns);
        }
        let expected = (rate_mib_s << 20) as f64;
        let error = (ready.bytes_per_s() as f64 - expected).abs() / expected;
        prop_assert!(error < 0.02, "{} against {expected}", ready.bytes_per_s());
    }
}

#[test]
fn idle_time_does_not_slow_the_rate() {
    let mut ready = RateModel::new(RateOptions::new(GIB));
    for start_s in [0, 100, 200, 300] {
        ready.submitted(GIB, start_s * S);
        ready.completed(GIB, (start_s + 1) * S);
    }
    assert_eq!(ready.bytes_per_s(), GIB);
}

#[test]
fn time_until_ready_is_queue_and_need_over_rate() {
    let mut options = RateOptions::new(GIB);
    options.fixed_ns = 7;
    let mut ready = RateModel::new(options);
    let cold = [Object { id: ObjectId(1), bytes: GIB }];
    let ask = |ready: &RateModel, cold, in_flight_bytes| {
        ready.time_to_ready_ns(&StagingNeed { cold, in_flight_bytes }, 0)
    };
    assert_eq!(ask(&ready, &[], 0), 0);
    assert_eq!(ask(&ready, &cold, 0), S + 7);
    ready.submitted(2 * GIB, 0);
    assert_eq!(ask(&ready, &[], 0), 0);
    assert_eq!(ask(&ready, &[], GIB), 2 * S + 7);
    assert_eq!(ask(&ready, &cold, 0), 3 * S + 7);
    ready.abandoned(2 * GIB, 0);
    assert_eq!(ask(&ready, &cold, 0), S + 7);
}
