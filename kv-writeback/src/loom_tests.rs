//! Every interleaving of small scenes: the gate, and the queues behind their lock.

use std::sync::Arc as Handle;

use kv_chunk::{Digest, WriteId};
use loom::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use crate::{Finished, Gate, Next, Refused, WritebackConfig, Written, shared::Shared};

const MAX_AGE_NS: u64 = 100;
const ID: WriteId = WriteId::new(1);

/// Stands for a record: counts when its slot is freed.
struct Token {
    freed: Arc<AtomicUsize>,
}

impl Drop for Token {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

type Tokens = Shared<Handle<Token>>;

fn digest(number: u8) -> Digest {
    Digest::from_bytes([number; 16])
}

fn shared(tiers: u8, staged: usize) -> (Arc<Tokens>, Arc<AtomicUsize>) {
    let mut config = WritebackConfig::new(tiers, staged);
    config.max_age_ns = MAX_AGE_NS;
    (Arc::new(Shared::new(&config)), Arc::new(AtomicUsize::new(0)))
}

/// Whether the chunk was newly staged.
fn stage(
    shared: &Tokens,
    freed: &Arc<AtomicUsize>,
    number: u8,
    id: WriteId,
    wanted: u8,
) -> Result<bool, Refused> {
    let Some(place) = shared.reserve(digest(number), id, wanted, 0)? else { return Ok(false) };
    place.commit(Handle::new(Token { freed: Arc::clone(freed) }))?;
    Ok(true)
}

fn finish(shared: &Tokens, tier: u8, number: u8, outcome: Written) -> Finished {
    shared.lock().finish(tier, digest(number), ID, outcome)
}

fn writes(shared: &Tokens, tier: u8) -> usize {
    let mut handed_out = 0;
    while let Next::Write(_token) = shared.next(tier, 0) {
        handed_out += 1;
    }
    handed_out
}

#[test]
fn a_write_starts_only_if_no_read_was_announced_to_its_thread() {
    loom::model(|| {
        let scene = Arc::new((Gate::new(MAX_AGE_NS), AtomicBool::new(false)));
        let reader = Arc::clone(&scene);
        let reader = thread::spawn(move || {
            reader.0.read_started();
            reader.1.store(true, Ordering::Release);
        });
        let announced = scene.1.load(Ordering::Acquire);
        assert!(!(announced && scene.0.may_write(0, Some(0))));
        reader.join().unwrap();
    });
}

#[test]
fn lost_hooks_never_hold_an_old_chunk_back() {
    loom::model(|| {
        let gate = Arc::new(Gate::new(MAX_AGE_NS));
        let hooks = Arc::clone(&gate);
        let hooks = thread::spawn(move || {
            hooks.forward_began();
            hooks.read_started();
            hooks.forward_ended();
        });
        assert!(gate.may_write(MAX_AGE_NS, Some(0)));
        hooks.join().unwrap();
        assert!(gate.may_write(MAX_AGE_NS, Some(0)));
        assert!(!gate.may_write(MAX_AGE_NS - 1, Some(0)));
    });
}

#[test]
fn reads_finished_twice_by_two_threads_do_not_wrap() {
    loom::model(|| {
        let gate = Arc::new(Gate::new(MAX_AGE_NS));
        gate.read_started();
        let other = Arc::clone(&gate);
        let other = thread::spawn(move || other.read_finished());
        gate.read_finished();
        other.join().unwrap();
        assert_eq!(gate.reads_in_flight(), 0);
        assert!(gate.may_write(0, Some(0)));
    });
}

#[test]
fn reads_that_start_and_end_at_once_are_all_counted() {
    loom::model(|| {
        let gate = Arc::new(Gate::new(MAX_AGE_NS));
        let other = Arc::clone(&gate);
        let other = thread::spawn(move || other.read_started());
        gate.read_started();
        gate.read_finished();
        gate.read_started();
        other.join().unwrap();
        assert_eq!(gate.reads_in_flight(), 2);
        assert!(!gate.may_write(0, Some(0)));
    });
}

#[test]
fn a_flush_that_ends_leaves_the_other_one_holding() {
    loom::model(|| {
        let gate = Arc::new(Gate::new(MAX_AGE_NS));
        gate.read_started();
        let other = Arc::clone(&gate);
        let other = thread::spawn(move || drop(other.hold_open()));
        let held = gate.hold_open();
        assert!(gate.may_write(0, None));
        other.join().unwrap();
        assert!(gate.may_write(0, None));
        drop(held);
        assert!(!gate.may_write(0, None));
    });
}

#[test]
fn one_chunk_offered_twice_is_staged_once() {
    loom::model(|| {
        let (shared, freed) = shared(1, 2);
        let other = (Arc::clone(&shared), Arc::clone(&freed));
        let other =
            thread::spawn(move || stage(&other.0, &other.1, 1, WriteId::new(2), 1).unwrap());
        let mine = stage(&shared, &freed, 1, ID, 1).unwrap();
        assert_ne!(mine, other.join().unwrap());
        assert_eq!(writes(&shared, 0), 1);
    });
}

#[test]
fn two_tiers_finish_on_their_own_and_the_slot_is_freed_once() {
    loom::model(|| {
        let (shared, freed) = shared(2, 2);
        stage(&shared, &freed, 1, ID, 0b11).unwrap();
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || write_one(&other, 1));
        let mine = write_one(&shared, 0);
        let other = other.join().unwrap();
        assert!(mine.last != other.last, "exactly one was the last");
        assert_eq!(mine.replicas | other.replicas, 0b11);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        assert!(shared.lock().chunks.is_empty());
    });
}

fn write_one(shared: &Tokens, tier: u8) -> Finished {
    let Next::Write(token) = shared.next(tier, 0) else { panic!("it is queued, the gate is open") };
    assert_eq!(token.freed.load(Ordering::Relaxed), 0);
    let finished = finish(shared, tier, 1, Written::Done);
    assert_eq!(token.freed.load(Ordering::Relaxed), 0, "freed under a holder");
    finished
}

#[test]
fn staging_while_a_tier_takes_chunks_loses_none_and_hands_none_out_twice() {
    loom::model(|| {
        let (shared, freed) = shared(1, 2);
        let stager = (Arc::clone(&shared), Arc::clone(&freed));
        let stager = thread::spawn(move || {
            stage(&stager.0, &stager.1, 1, ID, 1).unwrap();
            stage(&stager.0, &stager.1, 2, ID, 1).unwrap();
        });
        let early = writes(&shared, 0);
        stager.join().unwrap();
        assert_eq!(early + writes(&shared, 0), 2);
        assert!(finish(&shared, 0, 1, Written::Done).last);
        assert!(finish(&shared, 0, 2, Written::Failed).is_lost());
        assert_eq!(freed.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn two_threads_asking_for_one_tier_get_each_chunk_once() {
    loom::model(|| {
        let (shared, freed) = shared(1, 2);
        stage(&shared, &freed, 1, ID, 1).unwrap();
        stage(&shared, &freed, 2, ID, 1).unwrap();
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || writes(&other, 0));
        let mine = writes(&shared, 0);
        assert_eq!(mine + other.join().unwrap(), 2);
    });
}

#[test]
fn a_reader_finds_a_chunk_in_staging_or_in_the_directory() {
    loom::model(|| {
        let (shared, freed) = shared(1, 1);
        stage(&shared, &freed, 1, ID, 1).unwrap();
        let directory = Arc::new(AtomicBool::new(false));
        let writer = (Arc::clone(&shared), Arc::clone(&directory));
        let writer = thread::spawn(move || {
            assert!(matches!(writer.0.next(0, 0), Next::Write(_)));
            writer.1.store(true, Ordering::Release);
            assert!(finish(&writer.0, 0, 1, Written::Done).last);
        });
        let staged = shared.lock().get(digest(1)).is_some();
        assert!(staged || directory.load(Ordering::Acquire), "in neither place");
        writer.join().unwrap();
    });
}

#[test]
fn a_reader_keeps_the_bytes_past_the_last_finish() {
    loom::model(|| {
        let (shared, freed) = shared(1, 1);
        stage(&shared, &freed, 1, ID, 1).unwrap();
        let writer = Arc::clone(&shared);
        let writer = thread::spawn(move || write_one(&writer, 0).last);
        let read = shared.lock().get(digest(1)).cloned();
        assert!(writer.join().unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), usize::from(read.is_none()));
        drop(read);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_tier_that_vanishes_while_it_finishes_settles_each_write_once() {
    loom::model(|| {
        let (shared, freed) = shared(1, 1);
        stage(&shared, &freed, 1, ID, 1).unwrap();
        let tier = Arc::clone(&shared);
        let tier = thread::spawn(move || match tier.next(0, 0) {
            Next::Write(_) => finish(&tier, 0, 1, Written::Done).last,
            _ => false,
        });
        let lost = shared.lock().tier_gone(0).len();
        let written = usize::from(tier.join().unwrap());
        assert_eq!(lost + written, 1);
        let pending = shared.lock();
        assert_eq!(pending.stats.lost_writes, lost as u64);
        assert_eq!(pending.stats.replicas_written, written as u64);
        assert_eq!((pending.chunks.len(), pending.lanes[0].places), (0, 0));
        drop(pending);
        assert_eq!(freed.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_tier_that_vanishes_while_a_chunk_is_copied_leaves_no_place_taken() {
    loom::model(|| {
        let (shared, freed) = shared(1, 1);
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || other.lock().tier_gone(0).len());
        let staged = stage(&shared, &freed, 1, ID, 1);
        let lost = other.join().unwrap();
        assert_eq!(usize::from(staged.is_err()) + lost, 1);
        let pending = shared.lock();
        assert_eq!((pending.chunks.len(), pending.lanes[0].places), (0, 0));
        assert!(pending.lanes[0].queue.is_empty());
    });
}

#[test]
fn an_abandoned_place_is_given_back_under_contention() {
    loom::model(|| {
        let (shared, freed) = shared(1, 1);
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || drop(other.reserve(digest(1), ID, 1, 0)));
        let mine = stage(&shared, &freed, 2, ID, 1);
        other.join().unwrap();
        assert!(matches!(mine, Ok(true) | Err(Refused::StagingFull)));
        let pending = shared.lock();
        assert_eq!(pending.chunks.len(), usize::from(mine.is_ok()));
        assert_eq!(pending.lanes[0].places, usize::from(mine.is_ok()));
    });
}

#[test]
fn newcomers_share_the_slot_of_a_chunk_that_a_tier_holds() {
    loom::model(|| {
        let (shared, freed) = shared(2, 1);
        stage(&shared, &freed, 1, ID, 0b11).unwrap();
        assert!(matches!(shared.next(0, 0), Next::Write(_)));
        finish(&shared, 0, 1, Written::Done);
        let other = (Arc::clone(&shared), Arc::clone(&freed));
        let other = thread::spawn(move || stage(&other.0, &other.1, 2, ID, 1).is_ok());
        let mine = stage(&shared, &freed, 3, ID, 1).is_ok();
        assert!(mine != other.join().unwrap(), "one slot, one newcomer");
        assert_eq!(freed.load(Ordering::Relaxed), 1, "only the second replica's");
        assert_eq!(shared.lock().chunks.len(), 1);
    });
}
