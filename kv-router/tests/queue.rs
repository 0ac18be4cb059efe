//! The order in which a tier works on several steps.

use std::sync::Arc;

use kv_router::{ChunkSpec, Claim, Duplicates, PoolConfig, StepPool, TierId, TierMask, TierQueue};

const FAST: TierId = TierId(0);
const SLOW: TierId = TierId(1);

fn step(chunks: usize, tiers: TierMask) -> Arc<StepPool> {
    let spec = ChunkSpec { tiers, blocks: 4, bytes: 4 << 20, rank: 0 };
    Arc::new(StepPool::new(&vec![spec; chunks], &PoolConfig::new(2)).expect("a valid step"))
}

fn next(queue: &mut TierQueue<Arc<StepPool>>, steps: &[&Arc<StepPool>]) -> Option<(usize, Claim)> {
    let (step, claim) = queue.claim(Duplicates::Allowed)?;
    Some((steps.iter().position(|s| Arc::ptr_eq(s, step))?, claim))
}

#[test]
fn older_steps_first_then_later_ones_then_duplicates() {
    let (old, new) = (step(2, TierMask::all(2)), step(1, TierMask::all(2)));
    let mut queue = TierQueue::new(FAST, 8);
    queue.push(old.clone()).expect("there is room");
    queue.push(new.clone()).expect("there is room");
    let mut got = Vec::new();
    while let Some((step, claim)) = next(&mut queue, &[&old, &new]) {
        got.push((step, claim.blocks, claim.duplicate));
    }
    let firsts: Vec<_> = got.iter().filter(|(.., duplicate)| !duplicate).copied().collect();
    let whole = (0, 4, false);
    let piece = (1, 1, false);
    assert_eq!(firsts, [whole, whole, piece, piece, piece, piece], "split only the last step");
    let duplicates: Vec<_> = got.iter().filter(|(.., duplicate)| *duplicate).collect();
    assert!(got[..firsts.len()].iter().all(|(.., duplicate)| !duplicate));
    assert_eq!(duplicates.first().map(|(step, ..)| *step), Some(0), "oldest first");
    assert!(duplicates.is_sorted_by_key(|(step, ..)| *step));
}

#[test]
fn a_tier_with_a_write_in_flight_does_not_duplicate() {
    let only = step(1, TierMask::all(2));
    let mut queue = TierQueue::new(SLOW, 8);
    queue.push(only.clone()).expect("there is room");
    let mut claims = Vec::new();
    while let Some((_, claim)) = queue.claim(Duplicates::Forbidden) {
        claims.push(claim);
    }
    assert_eq!(claims.len(), 4);
    assert!(claims.iter().all(|claim| !claim.duplicate));
    assert!(queue.claim(Duplicates::Allowed).is_some_and(|(_, claim)| claim.duplicate));
}

#[test]
fn what_other_tiers_hold_is_passed_over() {
    let (theirs, ours) = (step(3, TierMask::only(SLOW)), step(3, TierMask::all(2)));
    let mut queue = TierQueue::new(FAST, 8);
    queue.push(theirs.clone()).expect("there is room");
    queue.push(ours.clone()).expect("there is room");
    let (step, _) = next(&mut queue, &[&theirs, &ours]).expect("the second step has work");
    assert_eq!(step, 1);
    assert!(!queue.is_idle());
}

#[test]
fn finished_steps_make_room() {
    let mut queue = TierQueue::new(FAST, 2);
    let steps: Vec<_> = (0..3).map(|_| step(1, TierMask::all(2))).collect();
    queue.push(steps[0].clone()).expect("there is room");
    queue.push(steps[1].clone()).expect("there is room");
    assert!(queue.push(steps[2].clone()).is_err(), "the queue is bounded");
    assert!(steps[0].cancel().step_done);
    queue.push(steps[2].clone()).expect("the first step is finished");
    assert_eq!(queue.steps().count(), 2);
    assert!(steps[1].cancel().step_done && steps[2].cancel().step_done);
    assert!(queue.is_idle());
    assert!(queue.claim(Duplicates::Allowed).is_none());
}
