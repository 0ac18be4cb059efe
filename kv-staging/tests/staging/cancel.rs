//! A claim is cancelled at every point of its life.

use kv_staging::{
    ClaimId, ClaimState, Effect, ObjectId, Reservation, Retrieval, policy::Immediate,
};

use super::controller::{Bench, object};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Point {
    Recorded,
    /// It does not fit.
    Eligible,
    /// Another comes in first.
    Committed,
    Staging,
    HalfStaged,
    /// One of its objects failed, the other is coming in.
    Failed,
    Ready,
    Requested,
    Retrieving,
    OnDemand,
}

const POINTS: [Point; 10] = [
    Point::Recorded,
    Point::Eligible,
    Point::Committed,
    Point::Staging,
    Point::HalfStaged,
    Point::Failed,
    Point::Ready,
    Point::Requested,
    Point::Retrieving,
    Point::OnDemand,
];

/// Brings a claim on objects 1 and 2 there; object 9 is another claim's.
fn reach(bench: &mut Bench, point: Point) -> ClaimId {
    if let Point::Eligible | Point::Committed = point {
        bench.record(&[object(9, if point == Point::Eligible { 90 } else { 10 })], 0);
        bench.tick(0);
    }
    let claim = bench.record(&[object(1, 40), object(2, 40)], 50);
    if matches!(point, Point::Recorded | Point::OnDemand) {
        if point == Point::OnDemand {
            assert_eq!(bench.controller.begin_retrieval(claim, 1), Ok(Retrieval::Demand));
        }
        return claim;
    }
    bench.tick(1);
    let staged = match point {
        Point::Eligible | Point::Committed | Point::Staging => 0..0,
        Point::HalfStaged => 1..2,
        Point::Failed => {
            bench.controller.object_failed(ObjectId(1), 2, &mut bench.effects).unwrap();
            bench.effects.clear();
            0..0
        }
        _ => 1..3,
    };
    staged.for_each(|id| drop(bench.staged(id, 2)));
    match point {
        Point::Requested => bench.controller.request_retrieval(claim, 3).unwrap(),
        Point::Retrieving => {
            assert_eq!(bench.controller.begin_retrieval(claim, 3), Ok(Retrieval::Protected));
        }
        _ => {}
    }
    claim
}

/// What must still come before its protection may end: objects in flight, and whether it is read.
fn outstanding(point: Point) -> (&'static [u128], bool) {
    match point {
        Point::Staging => (&[1, 2], false),
        Point::HalfStaged | Point::Failed => (&[2], false),
        Point::Retrieving | Point::OnDemand => (&[], true),
        _ => (&[], false),
    }
}

fn check(point: Point, reservation: Reservation, times: usize) {
    let about = format!("{point:?}, {reservation:?}, cancelled {times} times");
    let mut bench = Bench::new(Immediate, |options| {
        options.reservation = reservation;
        if point == Point::Committed {
            options.in_flight_bytes_max = 1;
        }
    });
    let claim = reach(&mut bench, point);
    let others = match point {
        Point::Eligible => 90,
        Point::Committed => 10,
        _ => 0,
    };
    let (in_flight, is_read) = outstanding(point);
    let held = bench.controller.budget().protected_bytes();
    for _ in 0..times {
        bench.controller.cancel(claim, 10, &mut bench.effects).unwrap();
    }
    let mut effects = std::mem::take(&mut bench.effects);
    for id in in_flight {
        assert_eq!(bench.state(claim), Some(ClaimState::StageDraining), "{about}");
        assert!(effects.is_empty(), "{about}: {effects:?} before its input is done");
        assert_eq!(bench.controller.budget().protected_bytes(), held, "{about}");
        effects.extend(bench.staged(*id, 11));
    }
    if is_read {
        assert_eq!(bench.state(claim), Some(ClaimState::RetrievalDraining), "{about}");
        assert!(effects.is_empty(), "{about}: {effects:?} before its reader is done");
        assert_eq!(bench.controller.budget().protected_bytes(), held, "{about}");
        bench.controller.finish_retrieval(claim, 12, &mut bench.effects).unwrap();
        effects.append(&mut bench.effects);
    }
    assert_eq!(effects.last(), Some(&Effect::Released(claim)), "{about}");
    assert_eq!(bench.state(claim), None, "{about}");
    assert_eq!(bench.controller.budget().protected_bytes(), others, "{about}");
    let unprotected = effects.iter().filter(|effect| matches!(effect, Effect::Unprotect(_)));
    let expected = match point {
        Point::Failed => 1,
        Point::Recorded | Point::Eligible | Point::Committed | Point::OnDemand => 0,
        _ => 2,
    };
    assert_eq!(unprotected.count(), expected, "{about}: {effects:?}");
}

#[test]
fn protection_outlives_cancellation_until_input_and_readers_are_done_wherever_it_strikes() {
    for point in POINTS {
        for reservation in [Reservation::Eager, Reservation::Lazy] {
            check(point, reservation, 1);
            // While it drains nothing changes.
            if outstanding(point) != (&[][..], false) {
                check(point, reservation, 2);
            }
        }
    }
}
