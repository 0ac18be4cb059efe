//! Random schedules at size, `SHUTTLE_ITERATIONS` of each step:
//! `cargo test -p kv-router --lib --features shuttle shuttle`.

use shuttle::sync::Arc;
use shuttle::thread;

use super::ledger::Ledger;
use super::{Actor, Operation, Random, config};
use crate::{StepPool, TierId};

fn step(seed: u64, chunks: usize, operations: usize) {
    let mut random = Random(seed);
    let tiers = 2 + random.below(3).to_le_bytes()[0];
    let specs = random.step(tiers, chunks);
    let pool = Arc::new(StepPool::new(&specs, &config(tiers, 2)).expect("a valid step"));
    let threads: Vec<_> = (0..tiers)
        .map(|tier| {
            let pool = pool.clone();
            thread::spawn(move || {
                let mut random = Random(seed << 8 | u64::from(tier));
                let (mut ledger, mut actor) = (Ledger::default(), Actor::default());
                for _ in 0..operations {
                    ledger.note(actor.apply(&pool, random.operation(TierId(tier))));
                }
                (ledger, actor)
            })
        })
        .collect();
    let (mut ledger, mut actor) = (Ledger::default(), Actor::default());
    match seed % 4 {
        0 => ledger.note(actor.apply(&pool, Operation::Mask(TierId(1)))),
        1 if seed % 8 == 1 => ledger.note(actor.apply(&pool, Operation::Cancel)),
        _ => {}
    }
    let mut actors = vec![actor];
    for thread in threads {
        let (theirs, actor) = thread.join().expect("no assertion failed");
        ledger.join(theirs);
        actors.push(actor);
    }
    ledger.close(&pool, &specs, actors);
}

const STEPS: u64 = 16;

/// Schedules of each step, a hundred by default.
fn iterations(what: &str) -> usize {
    let given = std::env::var("SHUTTLE_ITERATIONS").ok().and_then(|text| text.parse().ok());
    let iterations = given.unwrap_or(100);
    println!("{what}: {iterations} schedules of each of {STEPS} steps");
    iterations
}

#[test]
fn shuttle_random_schedules_resolve_every_chunk_once() {
    let iterations = iterations("random");
    for seed in 0..STEPS {
        shuttle::check_random(move || step(seed, 40, 100), iterations);
    }
}

#[test]
fn shuttle_few_preemptions_resolve_every_chunk_once() {
    let iterations = iterations("at most 3 preemptions");
    for seed in 0..STEPS {
        shuttle::check_pct(move || step(seed, 12, 40), iterations, 3);
    }
}
