//! Loads of callers that do not wait, counted locks, and single chunks removed.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{
    ByteSize, Config, Engine, Load, LoadQueue, LockTable, QueueSection, ThrottleSection, Wanted,
};
use kv_tiers::{FaultHandle, FaultKind, FaultPlan, When};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::common::*;

const NO_CACHE: ByteSize = ByteSize(0);

fn two_tiers() -> Config {
    config(&[("fast", ByteSize::gib(1)), ("slow", ByteSize::gib(1))], NO_CACHE)
}

fn queue(engine: &Arc<Engine>, set: impl FnOnce(&mut QueueSection)) -> LoadQueue {
    let mut section = QueueSection::default();
    section.memory = Some(ByteSize::mib(16));
    set(&mut section);
    LoadQueue::new(Arc::clone(engine), &section).unwrap()
}

fn filled(config: Config, keys: &[ChunkKey]) -> Arc<Engine> {
    let engine = Engine::open(config).unwrap();
    fill(&engine, keys);
    Arc::new(engine)
}

/// The same over tiers that can fail.
fn faulty(config: Config, keys: &[ChunkKey]) -> (Arc<Engine>, Vec<FaultHandle>) {
    let (engine, handles) = faulty_engine(config);
    fill(&engine, keys);
    (Arc::new(engine), handles)
}

fn set_all(handles: &[FaultHandle], kind: FaultKind) {
    let plan = FaultPlan::NONE.with(kind, When::Probability(1.0));
    handles.iter().for_each(|handle| handle.set_plan(plan.clone()));
}

fn wants(keys: &[ChunkKey]) -> Vec<Wanted> {
    keys.iter().map(|key| Wanted::new(key.clone(), CHUNK_BYTES)).collect()
}

/// Takes until it is done; every chunk handed over is right and comes once.
#[track_caller]
fn take_all(load: &Load) -> Vec<bool> {
    let mut seen = vec![0; load.wants().len()];
    let end = Instant::now() + SOON;
    loop {
        let answer = load.take(|place, bytes| {
            seen[place] += 1;
            let right = payload_of(&load.wants()[place].key, CHUNK_BYTES);
            assert!(bytes == right, "wrong bytes at {place}");
        });
        if let Some(hits) = answer {
            let once: Vec<u32> = hits.iter().map(|hit| u32::from(*hit)).collect();
            assert_eq!(seen, once);
            return hits;
        }
        assert!(Instant::now() < end, "the load does not end");
        load.wait(Duration::from_millis(100));
    }
}

#[test]
fn loads_submitted_together_are_one_step_and_common_chunks_are_read_once() {
    let keys = keys(0..12);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |section| {
        section.memory = Some(ByteSize::mib(32));
        section.gather_us = 300_000;
    });
    let loads =
        [queue.submit(wants(&keys)), queue.submit(wants(&keys[4..])), queue.submit(Vec::new())];
    assert_eq!(take_all(&loads[0]), [true; 12]);
    assert_eq!(take_all(&loads[1]), [true; 8]);
    assert!(take_all(&loads[2]).is_empty());
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.wanted, stats.hits), (1, 12, 12));
}

#[test]
fn a_step_that_is_ended_waits_for_no_other_loads() {
    let keys = keys(0..12);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |section| {
        // Whoever waits for others is late.
        section.gather_us = 1_000_000;
        section.deadline_ms = 900;
    });
    queue.end_step();
    let late = queue.submit(wants(&keys[..4]));
    assert_eq!(take_all(&late), [false; 4], "an ended step of nothing was taken for this one");
    let loads = [queue.submit(wants(&keys[..6])), queue.submit(wants(&keys[6..]))];
    queue.end_step();
    assert_eq!(take_all(&loads[0]), [true; 6]);
    assert_eq!(take_all(&loads[1]), [true; 6]);
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.wanted), (1, 12));
}

#[test]
fn a_chunk_that_is_being_read_for_one_load_is_not_read_again_for_the_next() {
    let keys = keys(0..4);
    let (engine, handles) = faulty(two_tiers(), &keys);
    set_all(&handles, FaultKind::Stalls { ns: 200_000_000 });
    let queue = queue(&engine, |section| section.gather_us = 0);
    let loads: Vec<Load> = (0..20)
        .map(|_| {
            thread::sleep(Duration::from_millis(1));
            queue.submit(wants(&keys))
        })
        .collect();
    for load in &loads {
        assert_eq!(take_all(load), [true; 4]);
    }
    let read = engine.stats().wanted;
    assert!(read < 40, "{read} chunks were read for 20 equal loads");
}

#[test]
fn a_load_of_more_than_the_memory_comes_as_it_is_taken() {
    let keys = keys(0..40);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |section| section.memory = Some(ByteSize::mib(3)));
    assert_eq!(take_all(&queue.submit(wants(&keys))), [true; 40]);
}

#[test]
fn absent_chunks_and_other_lengths_are_misses_and_nothing_is_handed_over() {
    let keys = keys(0..3);
    let engine = filled(two_tiers(), &keys[..2]);
    let queue = queue(&engine, |_| {});
    let mut wants = wants(&keys);
    wants[1].bytes -= 1;
    assert_eq!(take_all(&queue.submit(wants.clone())), [true, false, false]);
    wants[0].bytes = 2 << 20;
    assert_eq!(take_all(&queue.submit(wants)), [false, false, false]);
}

#[test]
fn a_load_ends_at_its_deadline_with_what_it_has_got() {
    let keys = keys(0..2);
    let (engine, handles) = faulty(two_tiers(), &keys);
    let queue = queue(&engine, |section| section.deadline_ms = 400);
    assert_eq!(take_all(&queue.submit(wants(&keys[..1]))), [true]);
    set_all(&handles, FaultKind::Stalls { ns: 5_000_000_000 });
    assert_eq!(take_all(&queue.submit(wants(&keys))), [false, false]);
    handles.iter().for_each(|handle| handle.set_plan(FaultPlan::NONE));
}

/// Takes a load only when the descriptor says so; what it brought, and how often it was told.
fn take_when_told(queue: &LoadQueue, load: &Load) -> (Vec<bool>, usize) {
    for told in 1.. {
        let mut fds = [PollFd::new(queue.load_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)).unwrap(), 1, "nothing was told");
        let mut count = [0; 8];
        nix::unistd::read(queue.load_fd(), &mut count).unwrap();
        if let Some(hits) = load.take(|_, _| {}) {
            return (hits, told);
        }
    }
    unreachable!("told without end")
}

#[test]
fn who_waits_on_the_descriptor_is_told() {
    let keys = keys(0..4);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |_| {});
    let load = queue.submit(wants(&keys));
    assert_eq!(take_when_told(&queue, &load).0, vec![true; 4]);
    assert_eq!(load.take(|_, _| panic!("handed over twice")), Some(vec![false; 4]));
}

#[test]
fn who_is_told_of_a_load_finds_it_done_unless_memory_is_wanted() {
    let keys = keys(0..8);
    let mut config = two_tiers();
    for tier in &mut config.tiers {
        // Chunks land some time apart.
        tier.throttle = Some(ThrottleSection::new(ByteSize(30 * CHUNK_BYTES as u64)));
    }
    let engine = filled(config, &keys);
    let queue = queue(&engine, |_| {});
    let load = queue.submit(wants(&keys));
    assert_eq!(take_when_told(&queue, &load), (vec![true; 8], 1));
}

#[test]
fn who_waits_on_the_descriptor_is_told_of_chunks_before_the_load_has_ended() {
    let keys = keys(0..8);
    let mut config = two_tiers();
    // Nor can the engine do without much of its own.
    config.engine.read_buffer = Some(ByteSize::mib(9));
    let engine = filled(config, &keys);
    // Its memory serves the next chunks only once it is taken.
    let queue = queue(&engine, |section| section.memory = Some(ByteSize::mib(2)));
    let load = queue.submit(wants(&keys));
    let (hits, told) = take_when_told(&queue, &load);
    assert_eq!(hits, vec![true; 8]);
    assert!(told > 1, "told once of eight chunks in the memory of two");
}

#[test]
fn loads_that_nobody_takes_give_their_memory_to_others() {
    let keys = keys(0..8);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |section| {
        section.memory = Some(ByteSize::mib(4));
        section.keep_ms = 50;
    });
    let forgotten: Vec<Load> = (0..8).map(|n| queue.submit(wants(&keys[n..=n]))).collect();
    for load in &forgotten {
        load.wait(SOON);
    }
    assert_eq!(take_all(&queue.submit(wants(&keys))), [true; 8]);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(forgotten[0].take(|_, _| panic!("kept too long")), Some(vec![false]));
}

#[test]
fn more_memory_than_the_process_may_use_is_refused_before_it_is_touched() {
    let engine = Arc::new(Engine::open(two_tiers()).unwrap());
    let mut section = QueueSection::default();
    section.memory = Some(ByteSize::gib(1 << 13));
    let refused = LoadQueue::new(engine, &section).unwrap_err().to_string();
    assert!(refused.starts_with("queue.memory: 8 TiB beside "), "{refused}");
    // What follows from other fields is named as well.
    let mut config = two_tiers();
    config.engine.chunk_bytes_max = ByteSize::mib(512);
    config.engine.staging = ByteSize::gib(1);
    config.tiers.iter_mut().for_each(|tier| tier.window = Some(1024));
    let refused = Engine::open(config).unwrap_err().to_string();
    assert!(refused.starts_with("engine.read_buffer: "), "{refused}");
}

#[test]
fn a_closed_queue_ends_its_loads_and_takes_no_more() {
    let keys = keys(0..4);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |section| section.gather_us = 1_000_000);
    let waiting = queue.submit(wants(&keys));
    queue.close();
    queue.close();
    assert_eq!(take_all(&waiting), [false; 4]);
    assert_eq!(take_all(&queue.submit(wants(&keys))), [false; 4]);
}

#[test]
fn a_chunk_locked_twice_stays_until_it_was_unlocked_twice() {
    let keys = keys(0..3);
    let engine = filled(two_tiers(), &keys[..2]);
    let locks = LockTable::default();
    assert_eq!(locks.lock(&engine, &keys), [true, true, false]);
    assert_eq!(locks.lock(&engine, &keys[..1]), [true]);
    assert_eq!((locks.len(), engine.stats().chunks_leased), (2, 2));
    assert_eq!(engine.delete(&keys), [false, false, true]);
    assert_eq!(locks.unlock(&keys), 1);
    assert_eq!(engine.delete(&keys[..2]), [false, true]);
    assert_eq!(locks.unlock(&keys), 2);
    assert!(locks.is_empty() && engine.stats().chunks_leased == 0);
    assert_eq!(engine.delete(&keys[..1]), [true]);
}

#[test]
fn a_deleted_chunk_is_unreadable_at_once_gone_from_the_tiers_soon_and_can_come_back() {
    let keys = keys(0..2);
    let engine = filled(
        config(&[("a", ByteSize::gib(1)), ("b", ByteSize::gib(1))], ByteSize::mib(8)),
        &keys,
    );
    assert_eq!(engine.delete(&keys[..1]), [true]);
    assert_eq!(engine.lookup(&keys).hits(), [false, true]);
    let end = Instant::now() + SOON;
    while engine.stats().tiers.iter().any(|tier| tier.chunks != 1) {
        assert!(Instant::now() < end, "the tiers keep it");
        thread::sleep(Duration::from_millis(1));
    }
    fill(&engine, &keys[..1]);
    let queue = queue(&engine, |_| {});
    assert_eq!(take_all(&queue.submit(wants(&keys))), [true, true]);
}

#[test]
fn a_whole_step_is_read_as_one_and_waits_for_nobody() {
    let keys = keys(0..12);
    let engine = filled(two_tiers(), &keys);
    let queue = queue(&engine, |section| {
        section.memory = Some(ByteSize::mib(32));
        (section.gather_us, section.deadline_ms) = (1_000_000, 700);
    });
    // Had it waited for others, it would have ended at its deadline.
    let loads = queue.submit_step(vec![wants(&keys), wants(&keys[4..]), Vec::new()]);
    assert_eq!(take_all(&loads[0]), [true; 12]);
    assert_eq!(take_all(&loads[1]), [true; 8]);
    assert!(take_all(&loads[2]).is_empty());
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.wanted, stats.hits), (1, 12, 12));
    assert!(queue.submit_step(Vec::new()).is_empty());
}
