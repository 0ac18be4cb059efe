//! What must hold of a step however its callers were interleaved, judged from what each was told.

use std::collections::{BTreeMap, BTreeSet};

use super::{Actor, Event, Operation, Read};
use crate::{ChunkSpec, ChunkStatus, Delivery, MissReason, Outcome, Split, StepPool, TierId};

/// Collects the events of all callers of one pool.
#[derive(Default)]
pub(crate) struct Ledger {
    events: Vec<Event>,
}

impl Ledger {
    pub(crate) fn note(&mut self, event: Option<Event>) {
        self.events.extend(event);
    }

    pub(crate) fn join(&mut self, other: Self) {
        self.events.extend(other.events);
    }

    /// Answers what `actors` still hold, claims and completes the rest, and judges the whole.
    pub(crate) fn close(mut self, pool: &StepPool, specs: &[ChunkSpec], actors: Vec<Actor>) {
        for mut actor in actors {
            while actor.holds() > 0 {
                self.note(actor.apply(pool, Operation::Complete(0)));
            }
        }
        for tier in (0..pool.config().tiers).rev().map(TierId) {
            self.drain(pool, tier);
        }
        if self.events.iter().any(|event| matches!(event, Event::Dropped)) {
            self.note(Actor::default().apply(pool, Operation::Cancel));
        }
        assert!(pool.is_finished(), "a chunk was lost: {pool:?} {:#?}", self.events);
        self.judge(pool, specs);
    }

    /// Claims and completes all that is left for the tier.
    fn drain(&mut self, pool: &StepPool, tier: TierId) {
        let mut actor = Actor::default();
        loop {
            self.note(actor.apply(pool, Operation::Claim(tier, Split::InTail)));
            if actor.holds() == 0 {
                break;
            }
            self.note(actor.apply(pool, Operation::Complete(0)));
        }
        for chunk in 0..u32::try_from(pool.len()).expect("a pool numbers its chunks") {
            let theirs = pool.remaining_tiers(chunk).is_some_and(|tiers| tiers.contains(tier));
            let waiting = pool.status(chunk) == Some(ChunkStatus::Waiting);
            assert!(!(theirs && waiting), "{tier} does not find chunk {chunk}: {:#?}", self.events);
        }
    }

    fn judge(&self, pool: &StepPool, specs: &[ChunkSpec]) {
        self.judge_claims(specs);
        let held = specs.iter().filter(|spec| !spec.tiers.is_empty()).count();
        let mut done_by_chunk = vec![0; specs.len()];
        let mut missed = 0;
        let mut steps_done = 0;
        let mut delivered: BTreeMap<(usize, u8), Vec<(Read, u64)>> = BTreeMap::new();
        for event in &self.events {
            match *event {
                Event::Completed(read, Delivery::First { new_bytes, chunk_done, step_done }) => {
                    let reads = delivered.entry((read.chunk, read.attempt)).or_default();
                    reads.push((read, new_bytes));
                    done_by_chunk[read.chunk] += usize::from(chunk_done);
                    steps_done += usize::from(step_done);
                }
                Event::Failed(_, _, Outcome::Missed { step_done })
                | Event::Expired(_, Outcome::Missed { step_done })
                | Event::PutBack(_, Outcome::Missed { step_done })
                | Event::Reread(_, Outcome::Missed { step_done }) => {
                    missed += 1;
                    steps_done += usize::from(step_done);
                }
                Event::Masked(_, withdrawn) | Event::Cancelled(withdrawn) => {
                    missed += withdrawn.missed as usize;
                    steps_done += usize::from(withdrawn.step_done);
                }
                _ => {}
            }
        }
        let done: usize = done_by_chunk.iter().sum();
        assert_eq!(done + missed, held, "each chunk is resolved once");
        assert_eq!(steps_done, usize::from(held > 0), "the end of the step is told once");
        for ((i, spec), done) in (0..).zip(specs).zip(&done_by_chunk) {
            let status = pool.status(i).expect("the chunk is of the step");
            assert_eq!(status == ChunkStatus::Delivered, *done == 1, "{i}");
            if spec.tiers.is_empty() {
                assert_eq!(status, ChunkStatus::Missed(MissReason::NoReplica));
            }
        }
        for ((i, attempt), reads) in delivered {
            if delivered_attempt(&self.events, i) != Some(attempt) {
                continue;
            }
            let new_bytes: u64 = reads.iter().map(|(_, new_bytes)| new_bytes).sum();
            assert_eq!(new_bytes, specs[i].bytes, "each byte counts once: {reads:?}");
            let here = |block| {
                let holds = |read: &Read| {
                    (read.first_block..read.first_block + read.blocks).contains(&block)
                };
                reads.iter().any(|(read, _)| holds(read))
            };
            assert!((0..specs[i].blocks).all(here), "blocks are missing: {reads:?}");
        }
        let bytes = specs.iter().filter(|spec| !spec.tiers.is_empty()).map(|spec| spec.bytes).sum();
        let budget = pool.config().duplicate_bytes(held as u64, bytes);
        assert!(pool.report().duplicate_bytes() <= budget, "{:?}", pool.report());
    }

    /// No tier reads what it does not hold, nor again what it failed to read. Each tier's events
    /// are in their order, for one caller acts for it at a time.
    fn judge_claims(&self, specs: &[ChunkSpec]) {
        let mut failed = BTreeSet::new();
        for event in &self.events {
            match *event {
                Event::Claimed(_, _, Some(read)) | Event::Duplicated(_, Some(read)) => {
                    assert!(specs[read.chunk].tiers.contains(read.tier), "{read:?}");
                    assert!(!failed.contains(&(read.chunk, read.tier)), "{read:?}");
                }
                Event::Failed(read, _, Outcome::Returned | Outcome::Covered)
                | Event::Expired(read, Outcome::Returned | Outcome::Covered) => {
                    failed.insert((read.chunk, read.tier));
                }
                _ => {}
            }
        }
    }
}

/// The attempt in which the chunk was completed.
fn delivered_attempt(events: &[Event], chunk: usize) -> Option<u8> {
    events.iter().find_map(|event| match event {
        Event::Completed(read, Delivery::First { chunk_done: true, .. }) if read.chunk == chunk => {
            Some(read.attempt)
        }
        _ => None,
    })
}
