//! The state machine and the budget.

use kv_staging::{Budget, Claim, ClaimId, ClaimState, Move, Object, ObjectId, StagingError};
use proptest::{collection::vec, prelude::*, sample::select};

use ClaimState::*;

const STATES: [ClaimState; 9] = [
    Recorded,
    Eligible,
    Committed,
    Staging,
    Ready,
    Retrieving,
    StageDraining,
    RetrievalDraining,
    Released,
];
const MOVES: [Move; 10] = [
    Move::BecomeEligible,
    Move::Commit,
    Move::StartStaging,
    Move::FinishStaging,
    Move::FailStaging,
    Move::FinishDraining,
    Move::StartRetrieval,
    Move::RetrieveOnDemand,
    Move::FinishRetrieval,
    Move::Cancel,
];

fn claim() -> Claim {
    Claim::new(ClaimId(1), &[Object { id: ObjectId(2), bytes: 10 }])
}

#[test]
fn the_whole_way_visits_every_state_once() {
    let mut claim = claim();
    let way = [
        (Move::BecomeEligible, Eligible),
        (Move::Commit, Committed),
        (Move::StartStaging, Staging),
        (Move::FinishStaging, Ready),
        (Move::StartRetrieval, Retrieving),
        (Move::FinishRetrieval, Released),
    ];
    for (step, state) in way {
        assert_eq!(claim.apply(step), Ok(state));
    }
}

#[test]
fn cancel_is_legal_in_every_state_and_waits_for_what_is_in_flight() {
    for state in STATES {
        let expected = match state {
            Staging | StageDraining => StageDraining,
            Retrieving | RetrievalDraining => RetrievalDraining,
            _ => Released,
        };
        assert_eq!(state.after(Move::Cancel), Some(expected));
    }
}

#[test]
fn exactly_the_drawn_moves_are_legal() {
    let legal = STATES.map(|state| MOVES.map(|step| state.after(step).is_some()).map(u8::from));
    let drawn = [
        // eligible commit start finish fail drained retrieve demand done cancel
        [1, 0, 0, 0, 0, 0, 0, 1, 0, 1], // recorded
        [0, 1, 0, 0, 0, 0, 0, 1, 0, 1], // eligible
        [0, 0, 1, 0, 0, 0, 0, 1, 0, 1], // committed
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 1], // staging
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 1], // ready
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1], // retrieving
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 1], // stage draining
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1], // retrieval draining
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1], // released
    ];
    assert_eq!(legal, drawn);
}

#[test]
fn an_illegal_move_says_so_and_changes_nothing() {
    let mut claim = claim();
    let refused = claim.apply(Move::StartRetrieval).unwrap_err();
    let expected = StagingError::IllegalMove {
        claim: ClaimId(1),
        state: Recorded,
        attempted: Move::StartRetrieval,
    };
    assert_eq!(refused, expected);
    assert_eq!(refused.to_string(), "claim 1 is Recorded and cannot StartRetrieval");
    assert_eq!(claim.state(), Recorded);
}

#[test]
fn an_object_named_twice_counts_once() {
    let object = |id| Object { id: ObjectId(id), bytes: 10 };
    let claim = Claim::new(ClaimId(1), &[object(2), object(1), object(2)]);
    assert_eq!(claim.objects(), [object(1), object(2)]);
    assert_eq!(claim.bytes(), 20);
}

#[test]
fn c_is_bytes_times_time() {
    let mut budget = Budget::new(100, 1_000);
    budget.reserve(10, 2_000).unwrap();
    budget.reserve(20, 3_000).unwrap();
    budget.release(10, 3_500);
    assert_eq!(budget.integral_byte_ns(4_000), 10 * 1_000 + 30 * 500 + 20 * 500);
    let blocked = budget.reserve(81, 4_000).unwrap_err();
    assert_eq!(blocked.to_string(), "81 bytes asked, 80 of 100 free");
    assert_eq!((budget.protected_bytes(), budget.peak_bytes()), (20, 30));
}

proptest! {
    #[test]
    fn no_move_leads_back_and_a_released_claim_stays(steps in vec(select(MOVES.as_slice()), 0..40)) {
        let mut claim = claim();
        for step in steps {
            let before = claim.state();
            match claim.apply(step) {
                Ok(after) => prop_assert!(after > before || (step == Move::Cancel && after == before)),
                Err(_) => prop_assert_eq!(claim.state(), before),
            }
        }
    }

    /// The oracle keeps every reservation and adds up bytes x time nanosecond by nanosecond of change.
    #[test]
    fn a_budget_is_never_exceeded_and_counts_exactly(
        steps in vec((0..1_000_u64, 0..60_u64, any::<prop::sample::Index>(), any::<bool>()), 0..60),
    ) {
        const CAPACITY: u64 = 100;
        let mut budget = Budget::new(CAPACITY, 0);
        let (mut held, mut now_ns, mut integral): (Vec<u64>, u64, u128) = (Vec::new(), 0, 0);
        for (wait_ns, bytes, which, reserve) in steps {
            integral += u128::from(held.iter().sum::<u64>()) * u128::from(wait_ns);
            now_ns += wait_ns;
            if reserve {
                let fits = held.iter().sum::<u64>() + bytes <= CAPACITY;
                prop_assert_eq!(budget.reserve(bytes, now_ns).is_ok(), fits);
                held.extend(fits.then_some(bytes));
            } else if !held.is_empty() {
                budget.release(held.swap_remove(which.index(held.len())), now_ns);
            }
            prop_assert_eq!(budget.protected_bytes(), held.iter().sum::<u64>());
            prop_assert!(budget.protected_bytes() <= CAPACITY);
            prop_assert_eq!(budget.integral_byte_ns(now_ns), integral);
        }
    }
}
