//! Every schedule of tiny steps, up to `LOOM_MAX_PREEMPTIONS`:
//! `RUSTFLAGS="--cfg loom" cargo test -p kv-router --lib --release loom`.

use loom::sync::Arc;
use loom::thread;

use super::ledger::Ledger;
use super::{Actor, Operation, chunk, config};
use crate::{ChunkSpec, Failure, PoolConfig, Split, StepPool, Tail, TierId, TierMask};

use Operation::{Cancel, Complete, Drop, Duplicate, Expire, Fail, Mask, PutBack, Reread};

const A: TierId = TierId(0);
const B: TierId = TierId(1);

fn claim(tier: TierId) -> Operation {
    Operation::Claim(tier, Split::InTail)
}

fn both(blocks: u32) -> ChunkSpec {
    chunk(TierMask::all(2), blocks, 0)
}

fn tail(tail: Tail) -> PoolConfig {
    PoolConfig { tail, duplicate_percent: 200, ..config(2, 1) }
}

/// Runs `before` alone, then the two scripts concurrently, the first with what `before` claimed;
/// then finishes the step alone and judges it.
fn explore(
    specs: &'static [ChunkSpec],
    config: PoolConfig,
    before: &'static [Operation],
    first: &'static [Operation],
    second: &'static [Operation],
) {
    loom::model(move || {
        let pool = Arc::new(StepPool::new(specs, &config).expect("a valid step"));
        let (mut ledger, mut actor) = (Ledger::default(), Actor::default());
        for &operation in before {
            ledger.note(actor.apply(&pool, operation));
        }
        let other = {
            let pool = pool.clone();
            thread::spawn(move || {
                let (mut ledger, mut actor) = (Ledger::default(), Actor::default());
                for &operation in second {
                    ledger.note(actor.apply(&pool, operation));
                }
                (ledger, actor)
            })
        };
        for &operation in first {
            ledger.note(actor.apply(&pool, operation));
        }
        let (theirs, other) = other.join().expect("no assertion failed");
        ledger.join(theirs);
        ledger.close(&pool, specs, vec![actor, other]);
    });
}

macro_rules! script {
    ($($operation:expr),* $(,)?) => {{
        let script: &'static [Operation] = Box::leak(Box::new([$($operation),*]));
        script
    }};
}

macro_rules! step {
    ($($chunk:expr),* $(,)?) => {{
        let step: &'static [ChunkSpec] = Box::leak(Box::new([$($chunk),*]));
        step
    }};
}

#[test]
fn loom_claim_against_claim() {
    let work = |tier| script![claim(tier), Complete(0), claim(tier), Complete(0)];
    explore(step![both(1), both(1)], tail(Tail::Whole), &[], work(A), work(B));
}

#[test]
fn loom_claim_against_fail() {
    let fail = script![Fail(0, Failure::Io)];
    let work = script![claim(B), claim(B)];
    explore(step![both(1), both(1)], tail(Tail::Whole), script![claim(A)], fail, work);
}

#[test]
fn loom_two_tiers_fail_the_same_chunks() {
    let fail = |tier| script![claim(tier), Fail(0, Failure::Corrupt), claim(tier)];
    explore(step![both(1), both(1)], tail(Tail::Whole), &[], fail(A), fail(B));
}

#[test]
fn loom_complete_against_expire() {
    // One caller holds the read, the other its duplicate.
    let before = script![claim(A)];
    let first = script![Expire(0), Complete(0)];
    let second = script![Duplicate(B), Complete(0), claim(B), Complete(0)];
    explore(step![both(1)], tail(Tail::Duplicate), before, first, second);
}

#[test]
fn loom_cancel_against_complete() {
    let before = script![claim(A), claim(A)];
    let first = script![Complete(0), Complete(0)];
    explore(step![both(1), both(1), both(1)], tail(Tail::Whole), before, first, script![Cancel]);
}

#[test]
fn loom_mask_against_claim_and_fail() {
    let first = script![claim(A), Fail(0, Failure::Io)];
    explore(step![both(1), both(1)], tail(Tail::Whole), &[], first, script![Mask(B)]);
}

#[test]
fn loom_mask_against_the_masked_tiers_claims() {
    let first = script![claim(A), claim(A)];
    explore(step![both(1), both(1)], tail(Tail::Whole), &[], first, script![Mask(A)]);
}

#[test]
fn loom_returned_chunk_is_found_again() {
    // A scanner finds the chunk listed but claimed, while its holder returns it.
    let before = script![claim(A), PutBack(0), claim(A)];
    let second = script![claim(B), claim(B)];
    explore(step![both(1), both(1)], tail(Tail::Whole), before, script![PutBack(0)], second);
}

#[test]
fn loom_put_back_against_claim() {
    let first = script![PutBack(0), claim(A)];
    explore(step![both(1)], tail(Tail::Whole), script![claim(A)], first, script![claim(B)]);
}

#[test]
fn loom_pieces_are_claimed_once() {
    let work = |tier| script![claim(tier), claim(tier)];
    explore(step![both(4)], tail(Tail::SplitAndDuplicate), &[], work(A), work(B));
}

#[test]
fn loom_piece_fails_while_others_are_claimed() {
    let first = script![Fail(0, Failure::Io), claim(A)];
    let second = script![claim(B), claim(B)];
    explore(step![both(4)], tail(Tail::SplitAndDuplicate), script![claim(A)], first, second);
}

#[test]
fn loom_duplicate_against_complete() {
    let before = script![claim(A)];
    let second = script![Duplicate(B), Complete(0)];
    explore(step![both(1)], tail(Tail::Duplicate), before, script![Complete(0)], second);
}

#[test]
fn loom_duplicate_against_fail() {
    let before = script![claim(A)];
    let second = script![Duplicate(B), Fail(0, Failure::Io)];
    explore(step![both(1)], tail(Tail::Duplicate), before, script![Fail(0, Failure::Io)], second);
}

#[test]
fn loom_duplicates_of_both_tiers() {
    let before = script![claim(A)];
    let first = script![Duplicate(A), Complete(1)];
    let second = script![Duplicate(B), Duplicate(B), Complete(0)];
    explore(step![both(1)], tail(Tail::Duplicate), before, first, second);
}

#[test]
fn loom_cancel_against_duplicate() {
    let second = script![Duplicate(B), Complete(0)];
    explore(step![both(1)], tail(Tail::Duplicate), script![claim(A)], script![Cancel], second);
}

#[test]
fn loom_dropped_claim_against_its_duplicate() {
    let second = script![Duplicate(B), Complete(0), claim(B)];
    explore(step![both(1)], tail(Tail::Duplicate), script![claim(A)], script![Drop(0)], second);
}

#[test]
fn loom_step_is_dropped_while_a_read_completes() {
    loom::model(|| {
        let pool = Arc::new(StepPool::new(&[both(1)], &config(2, 1)).expect("a valid step"));
        let claim = pool.claim(A).expect("it is unclaimed");
        let other = pool.clone();
        let thread = thread::spawn(move || other.complete(claim));
        let unanswered = pool.claim(B);
        drop(pool);
        drop(unanswered);
        let _ = thread.join().expect("it did not panic");
    });
}

#[test]
fn loom_reread_against_piece_deliveries() {
    let before = script![claim(A), claim(A)];
    let first = script![Complete(0), Reread(0)];
    let second = script![claim(B), Complete(0), claim(B), Complete(0)];
    explore(step![both(4)], tail(Tail::SplitAndDuplicate), before, first, second);
}
