//! Tiers that fail, lie, stall, vanish or panic: never a wrong byte, never a hang, the other tier helps out.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kv_chunk::{ChunkKey, WriteId};
use kv_connector::{ByteSize, Config, Engine, MissReason, Outcome, Source, TierMask, Want};
use kv_tiers::{
    Arena, Completion, EvictionGuard, FaultKind, FaultPlan, Op, OpId, Record, ThrottleConfig,
    Throttled, Tier, Unguarded, When, WriteOp,
};

use crate::common::*;

const NEVER: FaultKind = FaultKind::Stalls { ns: u64::MAX };

fn two_tiers() -> Config {
    config(&[("bad", ByteSize::gib(1)), ("good", ByteSize::gib(1))], ByteSize(0))
}

fn one_tier() -> Config {
    config(&[("bad", ByteSize::gib(1))], ByteSize(0))
}

fn plan(faults: &[(FaultKind, f64)]) -> FaultPlan {
    let add = |plan: FaultPlan, &(kind, probability): &(FaultKind, f64)| {
        plan.with(kind, When::Probability(probability))
    };
    faults.iter().fold(FaultPlan::NONE, add).seeded(7)
}

#[test]
fn a_tier_that_fails_in_every_way_costs_no_hit_while_the_other_works() {
    let (engine, handles) = faulty_engine(two_tiers());
    let keys = keys(0..40);
    fill(&engine, &keys);
    handles[0].set_plan(plan(&[
        (FaultKind::ReadFails, 0.1),
        (FaultKind::ReadStopsShort, 0.05),
        (FaultKind::ReadIsTruncated, 0.05),
        (FaultKind::ReadFlipsBit, 0.05),
        (FaultKind::ReadFindsItDeleted, 0.02),
        (FaultKind::Stalls { ns: 30_000_000 }, 0.05),
    ]));
    for _ in 0..4 {
        let (report, _) = load(&engine, &keys);
        assert_eq!(report.hits(), 40, "{report:?}");
    }
    handles[0].vanish();
    for _ in 0..3 {
        let (report, _) = load(&engine, &keys);
        assert_eq!(report.tiers[1].hits, 40, "{report:?}");
    }
    let struck = handles[0].counts();
    assert!(struck.len() > 4, "{struck:?}");
    let stats = engine.stats();
    assert!(
        stats.tiers[0].corrupt_reads > 0 && stats.tiers[0].errors.len() > 1,
        "{stats:?} {struck:?}"
    );
    handles[1].vanish();
    let (report, _) = load(&engine, &keys);
    assert_eq!((report.hits(), report.misses()), (0, 40));
    assert_eq!(engine.stats().hits, 7 * 40);
}

#[test]
fn damaged_chunks_leave_the_tier_and_are_misses_when_it_was_the_last() {
    let (engine, handles) = faulty_engine(one_tier());
    fill(&engine, &keys(0..3));
    handles[0].set_plan(plan(&[(FaultKind::ReadFlipsBit, 1.0)]));
    let (report, _) = load(&engine, &keys(0..3));
    assert_eq!(report.misses[&MissReason::Corrupt], 3);
    handles[0].set_plan(FaultPlan::NONE);
    assert_eq!(engine.lookup(&keys(0..3)).prefix_hits(), 0);
    let stats = engine.stats();
    assert_eq!((stats.tiers[0].chunks, stats.tiers[0].lost_chunks), (0, 3));
    // It can be stored again.
    fill(&engine, &keys(0..3));
    assert_eq!(load(&engine, &keys(0..3)).0.hits(), 3);
}

#[test]
fn a_chunk_deleted_behind_our_back_is_a_miss_once_and_forgotten() {
    let (engine, handles) = faulty_engine(one_tier());
    fill(&engine, &keys(0..2));
    handles[0].delete(key(0).digest());
    let (report, _) = load(&engine, &keys(0..2));
    assert_eq!((report.misses[&MissReason::Lost], report.hits()), (1, 1));
    assert_eq!(engine.lookup(&keys(0..2)).hits(), [false, true]);
}

#[test]
fn a_failed_write_is_never_visible_and_other_tiers_keep_theirs() {
    let (engine, handles) = faulty_engine(two_tiers());
    handles[0].set_plan(plan(&[(FaultKind::WriteFails, 1.0)]));
    fill(&engine, &keys(0..4));
    let (_, outcomes) = load(&engine, &keys(0..4));
    assert_eq!(outcomes, [Outcome::Hit(Source::Tier(1)); 4]);
    let stats = engine.stats();
    assert_eq!((stats.tiers[0].chunks, stats.tiers[1].chunks), (0, 4));
    assert_eq!((stats.replicas_written, stats.lost_writes), (4, 0));
    assert!(stats.replicas_failed > 0);
}

#[test]
fn a_torn_write_that_nobody_noticed_is_noticed_when_read() {
    let (engine, handles) = faulty_engine(two_tiers());
    handles[0]
        .set_plan(plan(&[(FaultKind::WriteTearsUnseen, 0.5), (FaultKind::WriteFlipsBit, 1.0)]));
    fill(&engine, &keys(0..20));
    let (report, outcomes) = load(&engine, &keys(0..20));
    assert_eq!(outcomes, [Outcome::Hit(Source::Tier(1)); 20], "{report:?}");
}

#[test]
fn a_full_disk_stops_writes_only_and_for_a_while() {
    let mut config = one_tier();
    config.engine.write_back_off_ms = 20;
    let (engine, handles) = faulty_engine(config);
    fill(&engine, &keys(0..2));
    handles[0].set_plan(plan(&[(FaultKind::WriteFindsNoSpace, 1.0)]));
    for key in keys(10..20) {
        let _ = engine.store(&key, &payload_of(&key, CHUNK_BYTES));
        assert!(engine.flush(SOON).drained);
    }
    assert_eq!(load(&engine, &keys(0..2)).0.storage_hits(), 2, "reads go on");
    assert_eq!(engine.stats().tiers[0].breaker, "closed");
    handles[0].set_plan(FaultPlan::NONE);
    wait_until(|| !engine.stats().tiers[0].writes_paused);
    fill(&engine, &keys(30..32));
    assert_eq!(load(&engine, &keys(30..32)).0.storage_hits(), 2);
}

fn wait_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < SOON, "not in time");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Keeps what was read to itself while it is shut.
#[derive(Debug)]
struct Gate {
    inner: Box<dyn Tier>,
    shut: Arc<AtomicBool>,
    kept: Vec<Completion>,
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Gate {
    forward_tier!(inner + submit);

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        self.inner.poll(now_ns, guard, &mut self.kept);
        if !self.shut.load(Ordering::Relaxed) {
            completions.append(&mut self.kept);
        }
        Some(now_ns + 1_000_000)
    }
}

#[test]
fn an_overdue_read_goes_to_the_other_tier_and_its_late_bytes_are_ignored() {
    let mut config = two_tiers();
    // Long beside what a busy machine takes for a read of memory.
    config.engine.read_deadline_ms = 2_000;
    config.engine.tail = kv_connector::TailPolicy::Whole;
    let arenas = arenas(&config);
    let shut = Arc::new(AtomicBool::new(false));
    let gate = Gate { inner: memory_tier(&config, 0), shut: Arc::clone(&shut), kept: Vec::new() };
    let tiers: Vec<Box<dyn Tier>> = vec![Box::new(gate), memory_tier(&config, 1)];
    let engine = Engine::with_tiers(config, arenas, tiers).unwrap();
    fill(&engine, &keys(0..20));
    shut.store(true, Ordering::Relaxed);
    // On a busy machine the other tier can be done before this one begins.
    for _ in 0..50 {
        let (report, outcomes) = load(&engine, &keys(0..20));
        assert_eq!(outcomes, [Outcome::Hit(Source::Tier(1)); 20], "{report:?}");
        if engine.stats().tiers[0].timed_out_reads > 0 {
            break;
        }
    }
    assert!(engine.stats().tiers[0].timed_out_reads > 0);
    assert_eq!(engine.stats().tiers[0].late_bytes, 0);
    shut.store(false, Ordering::Relaxed);
    // Their slots come back when the driver is through with them.
    let memory = engine.stats().read_memory;
    wait_until(|| engine.stats().read_memory.free_slots == memory.bytes / memory.slot_bytes);
    assert!(engine.stats().tiers[0].late_bytes > 0);
}

#[test]
fn a_step_ends_at_its_deadline_with_what_it_has() {
    let mut config = one_tier();
    config.engine.step_deadline_ms = 300;
    // Else the tier reads it a second time, and that read comes back.
    config.engine.tail = kv_connector::TailPolicy::Whole;
    let (engine, handles) = faulty_engine(config);
    fill(&engine, &keys(0..4));
    handles[0].set_plan(FaultPlan::NONE.with(NEVER, When::Nth(2)));
    let (report, _) = load(&engine, &keys(0..4));
    assert_eq!((report.hits(), report.misses[&MissReason::StepDeadline]), (3, 1));
    assert!(engine.close(Duration::from_millis(300)).leaked_threads <= 1);
}

#[test]
fn a_dead_tier_alone_gives_misses_in_time_and_is_read_again_when_it_is_back() {
    let mut config = one_tier();
    config.engine.read_deadline_ms = 40;
    let (engine, handles) = faulty_engine(config);
    fill(&engine, &keys(0..30));
    handles[0].set_plan(plan(&[(FaultKind::ReadFails, 1.0)]));
    let (report, _) = load(&engine, &keys(0..30));
    assert_eq!(report.misses(), 30);
    assert!(report.misses[&MissReason::TierMasked] > 0, "the breaker spared some reads");
    assert_eq!(engine.stats().tiers[0].breaker, "open");
    assert_eq!(engine.lookup(&keys(0..30)).prefix_hits(), 0);
    handles[0].set_plan(FaultPlan::NONE);
    wait_until(|| engine.stats().tiers[0].breaker == "closed");
    assert_eq!(load(&engine, &keys(0..30)).0.hits(), 30);
    handles[0].vanish();
    let _ = load(&engine, &keys(0..30));
    handles[0].come_back();
    wait_until(|| load(&engine, &keys(0..30)).0.hits() == 30);
}

/// Writes a chunk into a tier that no engine owns yet.
fn preload(tier: &mut dyn Tier, arena: &Arc<Arena>, key: &ChunkKey, id: u128, payload: &[u8]) {
    let slot = arena.try_take().unwrap();
    let record = Arc::new(Record::encode(slot, key, WriteId::new(id), payload).unwrap());
    tier.submit(Op::Write(WriteOp { id: OpId(1), record }), 0).unwrap();
    let mut completions = Vec::new();
    tier.poll(0, &Unguarded, &mut completions);
    assert!(matches!(completions[..], [Completion::Write { result: Ok(()), .. }]));
}

#[test]
fn pieces_of_two_stagings_are_never_combined() {
    const BYTES: usize = 6 << 20;
    let mut config = two_tiers();
    config.engine.chunk_bytes_max = ByteSize::mib(8);
    config.engine.staging = ByteSize::mib(64);
    config.tiers.iter_mut().for_each(|tier| tier.window = Some(1));
    let arenas = arenas(&config);
    let payloads = [vec![0xAA; BYTES], vec![0xBB; BYTES]];
    let tiers = (0..2).map(|index| {
        let mut tier = memory_tier(&config, index);
        let id = index as u128;
        preload(tier.as_mut(), &arenas.staging, &key(1), id, &payloads[index]);
        Box::new(Throttled::new(tier, ThrottleConfig::new(100_000_000))) as Box<dyn Tier>
    });
    let tiers = tiers.collect();
    let engine = Engine::with_tiers(config, arenas, tiers).unwrap();
    let mut mixed = 0;
    for _ in 0..20 {
        let mut dest = vec![0; BYTES];
        let key = key(1);
        let lease = engine.lookup(std::slice::from_ref(&key));
        let mut wants = [Want::new(&key, &mut dest)];
        let report = engine.load(&lease, &mut wants);
        assert!(wants[0].outcome.is_hit(), "{report:?}");
        assert!(payloads.contains(&dest), "two stagings in one chunk");
        mixed += report.tiers.iter().map(|tier| tier.mixed_pieces).sum::<u64>();
        if mixed > 2 {
            return;
        }
    }
    panic!("the tiers never shared the chunk");
}

/// Panics in `poll` once armed.
#[derive(Debug)]
struct Bomb {
    inner: Box<dyn Tier>,
    armed: Arc<AtomicBool>,
}

#[deny(clippy::missing_trait_methods)]
impl Tier for Bomb {
    forward_tier!(inner + submit);

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        assert!(!self.armed.load(Ordering::Relaxed) || self.inner.in_flight() == 0, "boom");
        self.inner.poll(now_ns, guard, completions)
    }
}

#[test]
fn a_tier_whose_thread_panics_is_gone_and_nobody_waits_for_it() {
    let config = two_tiers();
    let arenas = arenas(&config);
    let armed = Arc::new(AtomicBool::new(false));
    let bomb = Bomb { inner: memory_tier(&config, 0), armed: Arc::clone(&armed) };
    let tiers: Vec<Box<dyn Tier>> = vec![Box::new(bomb), memory_tier(&config, 1)];
    let engine = Engine::with_tiers(config, arenas, tiers).unwrap();
    fill(&engine, &keys(0..30));
    armed.store(true, Ordering::Relaxed);
    let (report, outcomes) = load(&engine, &keys(0..30));
    assert_eq!(outcomes, [Outcome::Hit(Source::Tier(1)); 30], "{report:?}");
    assert!(report.seconds < 20.0);
    // The other tier may have read it all before the bomb went off, or even was found.
    wait_until(|| {
        let _ = load(&engine, &keys(0..30));
        engine.stats().tiers[0].breaker == "gone"
    });
    // Life goes on with the other tier.
    fill(&engine, &keys(40..42));
    assert_eq!(load(&engine, &keys(40..42)).0.storage_hits(), 2);
    let only_bad = TierMask::from_bits(0b01);
    let (_, outcomes) = load_from(&engine, &keys(0..1), only_bad);
    assert_eq!(outcomes, [Outcome::Miss(MissReason::TierMasked)]);
    assert!(engine.close(SOON).drained);
}

#[test]
fn closing_does_not_wait_longer_than_told_for_a_stuck_tier() {
    let (engine, handles) = faulty_engine(two_tiers());
    handles[0].set_plan(FaultPlan::NONE.with(NEVER, When::Nth(1)));
    for key in keys(0..3) {
        let _ = engine.store(&key, &payload_of(&key, CHUNK_BYTES));
    }
    // All but the one that is stuck.
    wait_until(|| engine.stats().pending_writes == 1);
    let closed = engine.close(Duration::from_millis(500));
    assert_eq!((closed.drained, closed.abandoned_chunks), (false, 1), "{closed:?}");
}

#[test]
fn what_a_step_gave_up_is_not_read_any_more() {
    let mut config = one_tier();
    config.engine.step_deadline_ms = 150;
    // Nothing else is read: a search for a window has reads of its own in flight.
    config.tiers[0].window = Some(8);
    let (bytes, keys) = (1 << 18, keys(0..40));
    let (engine, _) = paced_engine(config, 10_000_000, &keys, bytes);
    let (report, _) = load_sized(&engine, &keys, TierMask::all(1), bytes);
    assert!(report.misses[&MissReason::StepDeadline] > 10, "{report:?}");
    let memory = engine.stats().read_memory;
    wait_until(|| engine.stats().read_memory.free_slots == memory.bytes / memory.slot_bytes);
    let tier = &engine.stats().tiers[0];
    let window = 8 * bytes as u64;
    assert!(tier.payload_bytes + tier.late_bytes <= report.storage_bytes + window, "{tier:?}");
}

/// One tier of the given speed, which holds the chunks of `keys`.
fn paced_engine(
    config: Config,
    bytes_per_s: u64,
    keys: &[ChunkKey],
    bytes: usize,
) -> (Engine, Arc<Arena>) {
    let arenas = arenas(&config);
    let staging = Arc::clone(&arenas.staging);
    let mut tier = memory_tier(&config, 0);
    for (id, key) in (0..).zip(keys) {
        preload(tier.as_mut(), &staging, key, id, &payload_of(key, bytes));
    }
    let tier = Throttled::new(tier, ThrottleConfig::new(bytes_per_s));
    (Engine::with_tiers(config, arenas, vec![Box::new(tier)]).unwrap(), staging)
}

#[test]
fn young_chunks_are_not_written_while_a_load_reads() {
    let mut config = one_tier();
    config.engine.write_max_age_ms = 3_600_000;
    let (bytes, keys) = (1 << 18, keys(0..40));
    let (engine, _) = paced_engine(config, 8_000_000, &keys, bytes);
    let loading = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            loading.store(true, Ordering::Release);
            let (report, _) = load_sized(&engine, &keys, TierMask::all(1), bytes);
            assert_eq!(report.hits(), 40);
            loading.store(false, Ordering::Release);
        });
        wait_until(|| engine.stats().tiers[0].payload_bytes > 0);
        let _ = engine.store(&key(99), &payload_of(&key(99), bytes));
        // As long as the load lasted when this thread looked, nothing was written before that.
        let mut looks = 0;
        loop {
            let (written, steps) = (engine.stats().replicas_written, engine.stats().steps);
            if !loading.load(Ordering::Acquire) || steps > 0 {
                break;
            }
            assert_eq!(written, 0);
            looks += 1;
            thread::sleep(Duration::from_millis(5));
        }
        assert!(looks > 5, "the load was over at once");
    });
    // Nobody has to flush: the end of the load opens the gate.
    wait_until(|| engine.stats().replicas_written == 1);
}
