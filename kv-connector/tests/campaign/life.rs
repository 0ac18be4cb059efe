//! One run: a random life of an engine, everything that it answers checked.

use std::{
    collections::BTreeMap,
    fmt, thread,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{
    EngineStats, Outcome, Stored, TierMask, TierStatus, Want, WindowState,
    inspect::{PurgeRequest, Selector},
    jump_clock,
    replay::wrong_bytes,
};
use kv_tiers::{FaultHandle, FaultKind, FaultPlan};

use crate::{
    model::{Chunks, TENANT},
    rig::{Plan, Rig, disk_bytes, faults},
};

/// What need not be quick but must come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Beyond its own deadline a load takes no longer than a busy machine explains.
const SLACK: Duration = Duration::from_secs(20);

/// What happened in some runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    stored: u64,
    hits: u64,
    misses: u64,
    restarts: u64,
    purged: u64,
    damaged_files: u64,
    jumps: u64,
    struck: BTreeMap<String, u64>,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        for (sum, value) in [
            (&mut self.stored, other.stored),
            (&mut self.hits, other.hits),
            (&mut self.misses, other.misses),
            (&mut self.restarts, other.restarts),
            (&mut self.purged, other.purged),
            (&mut self.damaged_files, other.damaged_files),
            (&mut self.jumps, other.jumps),
        ] {
            *sum += value;
        }
        for (kind, count) in &other.struck {
            *self.struck.entry(kind.clone()).or_default() += count;
        }
    }

    pub(crate) fn is_worth_something(&self) -> bool {
        let happened = [self.hits, self.misses, self.restarts, self.purged, self.damaged_files];
        happened.iter().all(|count| *count > 0) && self.struck.len() >= 12
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stored, hits, misses, restarts, purged, damaged_files, jumps, struck } = self;
        write!(f, "{stored} chunks stored, {hits} hits and {misses} misses checked, ")?;
        write!(f, "{restarts} restarts, {purged} chunks purged, {damaged_files} files damaged, ")?;
        write!(f, "{jumps} clock jumps, faults {struck:?}")
    }
}

struct Life {
    random: fastrand::Rng,
    plan: Plan,
    chunks: Chunks,
    rig: Rig,
    vanished: Vec<bool>,
    tally: Tally,
}

pub(crate) fn live(seed: u64) -> Tally {
    let mut random = fastrand::Rng::with_seed(seed);
    let plan = Plan::new(&mut random);
    let chunks = Chunks::new(seed, plan.sizes.clone(), random.u64(10..80));
    let (rig, vanished) = (plan.open(), vec![false; plan.tiers.len()]);
    let mut life = Life { random, plan, chunks, rig, vanished, tally: Tally::default() };
    for _ in 0..life.random.u32(8..28) {
        life.act();
        life.check_caps();
    }
    life.end();
    life.tally
}

impl Life {
    fn act(&mut self) {
        let tier = self.random.usize(0..self.plan.tiers.len());
        match self.random.u8(0..100) {
            0..30 => self.store(),
            30..60 => self.load(),
            60..75 => self.rig.faults[tier].set_plan(faults(&mut self.random)),
            75..79 => {
                self.rig.faults[tier].vanish();
                self.vanished[tier] = true;
            }
            79..84 => self.come_back(),
            84..88 => {
                let digest = self.chunks.key(self.random.u64(0..self.chunks.count)).digest();
                self.rig.faults[tier].delete(digest);
            }
            88..91 => self.damage(),
            91..94 => {
                jump_clock(self.random.u64(1_000_000..20_000_000_000));
                self.tally.jumps += 1;
            }
            94..97 => self.purge(),
            _ => self.restart(),
        }
    }

    fn store(&mut self) {
        for _ in 0..self.random.u32(1..12) {
            let chunk = self.random.u64(0..self.chunks.count);
            let (key, payload) = (self.chunks.key(chunk), self.chunks.payload(chunk));
            self.chunks.offered.insert(chunk);
            self.chunks.purged.remove(&chunk);
            let stored = self.rig.engine.store(&key, &payload);
            self.tally.stored += u64::from(stored == Stored::Staged);
        }
        if self.random.bool() {
            let by = Duration::from_millis(self.random.u64(1..50));
            self.rig.engine.flush(by);
        }
    }

    fn load(&mut self) {
        let count = self.random.usize(1..24);
        let chunks: Vec<u64> = (0..count).map(|_| self.any_chunk()).collect();
        let keys: Vec<ChunkKey> = chunks.iter().map(|&chunk| self.chunks.key(chunk)).collect();
        let mut buffers: Vec<_> =
            chunks.iter().map(|&chunk| vec![0xee; self.chunks.bytes_of(chunk)]).collect();
        let looked_up = if self.random.u8(0..4) == 0 { &keys[..count / 2] } else { &keys[..] };
        let lease = self.rig.engine.lookup(looked_up);
        let mut wants: Vec<Want<'_>> =
            keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
        let mask = if self.random.u8(0..5) == 0 { self.random.u8(0..8) } else { 7 };
        for want in &mut wants {
            want.tiers = TierMask::from_bits(mask);
        }
        let began = Instant::now();
        let report = self.rig.engine.load(&lease, &mut wants);
        let limit = Duration::from_millis(self.plan.config.engine.step_deadline_ms) + SLACK;
        assert!(began.elapsed() < limit, "a load took {:?}", began.elapsed());
        for (chunk, want) in chunks.iter().zip(&wants) {
            if want.outcome.is_hit() {
                let wrong = wrong_bytes(want.key.digest(), want.dest);
                assert_eq!(wrong, 0, "WRONG BYTES of chunk {chunk}: {:?}", want.outcome);
                assert!(self.chunks.offered.contains(chunk), "chunk {chunk} was never stored");
                assert!(!self.chunks.purged.contains(chunk), "chunk {chunk} was purged");
            }
        }
        let hits = wants.iter().filter(|want| want.outcome.is_hit()).count() as u64;
        let outcomes: Vec<Outcome> = wants.iter().map(|want| want.outcome).collect();
        assert_eq!((report.hits(), report.wanted), (hits, count as u64), "{outcomes:?}");
        assert_eq!(report.misses() + report.hits(), report.wanted, "{report:?}");
        self.tally.hits += hits;
        self.tally.misses += report.misses();
        if self.random.u8(0..6) == 0 {
            // Held a while longer: evictions go around it.
            self.store();
        }
        drop(lease);
    }

    /// Mostly one that may be there.
    fn any_chunk(&mut self) -> u64 {
        let offered = self.chunks.offered.len();
        let known = self.random.u8(0..5) > 0 && offered > 0;
        let chunk = known.then(|| self.random.usize(0..offered));
        let chunk = chunk.and_then(|index| self.chunks.offered.iter().nth(index).copied());
        chunk.unwrap_or_else(|| self.random.u64(0..self.chunks.count))
    }

    fn come_back(&mut self) {
        self.rig.faults.iter().for_each(FaultHandle::come_back);
        self.vanished.fill(false);
    }

    /// Behind the back of a running engine, or of one that rests.
    fn damage(&mut self) {
        let stores = self.plan.stores();
        if !stores.is_empty() {
            let tier = stores[self.random.usize(0..stores.len())];
            let damaged = self.plan.damage(tier, &mut self.random);
            self.tally.damaged_files += u64::from(damaged);
        }
    }

    fn purge(&mut self) {
        let mut request = PurgeRequest::new(Selector::salt(TENANT));
        request.wait_ms = self.random.u64(0..20);
        let report = self.rig.engine.purge(&request).unwrap();
        self.tally.purged += report.tiers.iter().map(|tier| tier.removed_chunks).sum::<u64>();
        // A medium that is away keeps what it holds.
        if report.complete && !self.vanished.contains(&true) {
            let tenants = (0..self.chunks.count).filter(|&chunk| Chunks::is_tenants(chunk));
            self.chunks.purged.extend(tenants);
        }
    }

    fn restart(&mut self) {
        self.quiesce();
        let closed = self.rig.engine.close(PATIENCE);
        assert_eq!(closed.leaked_threads, 0, "{closed:?}");
        if self.random.u8(0..4) == 0 {
            self.damage();
        }
        self.check_caps();
        self.rig = self.plan.open();
        self.vanished.fill(false);
        self.tally.restarts += 1;
    }

    fn check_caps(&self) {
        let stats = self.rig.engine.stats();
        for (index, (plan, tier)) in self.plan.tiers.iter().zip(&stats.tiers).enumerate() {
            let cap = plan.capacity_bytes;
            assert!(tier.used_bytes <= cap, "{} of {cap} used: {tier:?}", tier.used_bytes);
            let on_disk = disk_bytes(&self.plan.directory(index));
            assert!(on_disk <= cap, "{on_disk} bytes on the medium, cap {cap}: {tier:?}");
        }
    }

    /// Without faults everything comes to rest: nothing is held, every fault was counted.
    fn quiesce(&mut self) {
        self.rig.faults.iter().for_each(|faults| faults.set_plan(FaultPlan::NONE));
        self.come_back();
        assert!(self.rig.engine.flush(PATIENCE).drained, "{:#?}", self.rig.engine.stats());
        let at_rest = |stats: &EngineStats| {
            let memories = [&stats.read_memory, &stats.staging_memory];
            // One slot may be the scrubber's.
            let scrubs = stats.tiers.len() as u64;
            let cached = stats.host_cache.chunks;
            let free = |(index, memory): (usize, &&kv_connector::MemoryStats)| {
                let held = if index == 0 { scrubs + cached } else { 0 };
                memory.free_slots + held >= memory.bytes / memory.slot_bytes
            };
            stats.chunks_leased == 0 && memories.iter().enumerate().all(free)
        };
        self.wait("something is still held", |stats, _| at_rest(stats));
        self.wait("a fault was not counted", |stats, faults| {
            stats.tiers.iter().zip(faults).all(|(tier, faults)| is_counted(tier, faults))
        });
        for faults in &self.rig.faults {
            for (kind, count) in faults.counts() {
                let name = match kind {
                    FaultKind::Stalls { .. } => "Stalls".to_owned(),
                    kind => format!("{kind:?}"),
                };
                *self.tally.struck.entry(name).or_default() += count;
            }
        }
    }

    fn wait(&self, what: &str, is_true: impl Fn(&EngineStats, &[FaultHandle]) -> bool) {
        let began = Instant::now();
        loop {
            // What struck is looked at first: it is counted soon after.
            let stats = self.rig.engine.stats();
            if is_true(&stats, &self.rig.faults) {
                return;
            }
            if began.elapsed() > PATIENCE {
                let struck: Vec<_> = self.rig.faults.iter().map(FaultHandle::counts).collect();
                panic!("{what}: {stats:#?}\nstruck: {struck:?}");
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(&mut self) {
        self.quiesce();
        self.load();
        let closed = self.rig.engine.close(PATIENCE);
        assert!(closed.drained && closed.leaked_threads == 0, "{closed:?}");
        self.check_caps();
    }
}

fn is_counted(tier: &TierStatus, faults: &FaultHandle) -> bool {
    // The reads that learn a window are of no step, and only end the learning when they fail.
    if tier.window_search.state != WindowState::Fixed {
        return true;
    }
    let struck = |kinds: &[FaultKind]| kinds.iter().map(|kind| faults.count(*kind)).sum::<u64>();
    let counted = |kind: &str| tier.errors.get(kind).copied().unwrap_or(0);
    counted("read_io") >= struck(&[FaultKind::ReadFails])
        && counted("read_short") >= struck(&[FaultKind::ReadStopsShort])
        && counted("write_io") >= struck(&[FaultKind::WriteFails, FaultKind::WriteTears])
        && counted("write_no_space") >= struck(&[FaultKind::WriteFindsNoSpace])
        && tier.corrupt_reads >= struck(&[FaultKind::ReadIsTruncated, FaultKind::ReadFlipsBit])
        && tier.lost_chunks >= struck(&[FaultKind::ReadFindsItDeleted])
}
