//! Real threads, one a tier, with every kind of trouble at random.

use std::sync::Barrier;
use std::thread;

use super::ledger::Ledger;
use super::{Actor, Operation, Random, config};
use crate::{StepPool, TierId};

#[test]
fn threads_resolve_every_chunk_once() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let tiers = 2 + random.below(4).to_le_bytes()[0];
        let specs = random.step(tiers, 200);
        let pool = StepPool::new(&specs, &config(tiers, 4)).expect("a valid step");
        let start = Barrier::new(usize::from(tiers) + 1);
        let mut ledger = Ledger::default();
        let mut actors = Vec::new();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..tiers)
                .map(|tier| {
                    scope.spawn({
                        let (pool, start) = (&pool, &start);
                        move || {
                            let mut random = Random(seed << 8 | u64::from(tier));
                            let (mut ledger, mut actor) = (Ledger::default(), Actor::default());
                            start.wait();
                            for _ in 0..600 {
                                ledger.note(actor.apply(pool, random.operation(TierId(tier))));
                            }
                            (ledger, actor)
                        }
                    })
                })
                .collect();
            start.wait();
            let mut actor = Actor::default();
            match seed % 4 {
                0 => ledger.note(actor.apply(&pool, Operation::Mask(TierId(1)))),
                1 if seed % 8 == 1 => ledger.note(actor.apply(&pool, Operation::Cancel)),
                _ => {}
            }
            for thread in threads {
                let (theirs, actor) = thread.join().expect("no assertion failed");
                ledger.join(theirs);
                actors.push(actor);
            }
        });
        ledger.close(&pool, &specs, actors);
    }
}
