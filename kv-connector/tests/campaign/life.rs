//! One run: a random life of an engine, everything that it answers checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, thread,
    time::{Duration, Instant},
};

use kv_chunk::ChunkKey;
use kv_connector::{
    EngineStats, Outcome, Stored, TierMask, TierStatus, Want, WindowState,
    inspect::{CheckOptions, Offline, PurgeRequest, Selector, check},
    jump_clock,
    replay::wrong_bytes,
};
use kv_tiers::{FaultHandle, FaultKind, FaultPlan};

use crate::{
    model::{Chunks, TENANT},
    rig::{Plan, Rig, disk_bytes, faults},
    shared,
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
    /// Hits of chunks that only another node had stored.
    from_others: u64,
    restarts: u64,
    purged: u64,
    damaged_files: u64,
    jumps: u64,
    repairs: u64,
    /// Those that found damage.
    repaired: u64,
    struck: BTreeMap<String, u64>,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        for (sum, value) in [
            (&mut self.stored, other.stored),
            (&mut self.hits, other.hits),
            (&mut self.misses, other.misses),
            (&mut self.from_others, other.from_others),
            (&mut self.restarts, other.restarts),
            (&mut self.purged, other.purged),
            (&mut self.damaged_files, other.damaged_files),
            (&mut self.jumps, other.jumps),
            (&mut self.repairs, other.repairs),
            (&mut self.repaired, other.repaired),
        ] {
            *sum += value;
        }
        for (kind, count) in &other.struck {
            *self.struck.entry(kind.clone()).or_default() += count;
        }
    }

    pub(crate) fn is_worth_something(&self) -> bool {
        let Self { hits, misses, from_others, restarts, purged, damaged_files, .. } = *self;
        let happened = [hits, misses, from_others, restarts, purged, damaged_files];
        happened.iter().all(|count| *count > 0) && self.struck.len() >= 12
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stored, hits, misses, from_others, .. } = self;
        let Self { restarts, purged, damaged_files, jumps, struck, .. } = self;
        let Self { repairs, repaired, .. } = self;
        write!(f, "{stored} chunks stored, {hits} hits ({from_others} of other nodes' chunks) ")?;
        write!(f, "and {misses} misses checked, ")?;
        write!(f, "{restarts} restarts, {purged} chunks purged, {damaged_files} files damaged, ")?;
        write!(
            f,
            "{repaired} of {repairs} repairs found damage, {jumps} clock jumps, faults {struck:?}"
        )
    }
}

struct Life {
    random: fastrand::Rng,
    plan: Plan,
    chunks: Chunks,
    nodes: Vec<Node>,
    /// The node that acts.
    at: usize,
    tally: Tally,
}

struct Node {
    rig: Rig,
    vanished: Vec<bool>,
    offered: BTreeSet<u64>,
}

pub(crate) fn live(seed: u64) -> Tally {
    let mut random = fastrand::Rng::with_seed(seed);
    let plan = Plan::new(&mut random);
    let chunks = Chunks::new(seed, plan.sizes.clone(), random.u64(10..80));
    let node = |node| Node {
        rig: plan.open(node),
        vanished: vec![false; plan.tiers.len()],
        offered: BTreeSet::new(),
    };
    let nodes = (0..plan.nodes).map(node).collect();
    let mut life = Life { random, plan, chunks, nodes, at: 0, tally: Tally::default() };
    for _ in 0..life.random.u32(8..28) {
        life.at = life.random.usize(0..life.nodes.len());
        life.act();
        life.check_caps();
    }
    life.end();
    life.tally
}

impl Life {
    fn node(&mut self) -> &mut Node {
        &mut self.nodes[self.at]
    }

    fn act(&mut self) {
        let tier = self.random.usize(0..self.plan.tiers.len());
        match self.random.u8(0..100) {
            0..30 => self.store(),
            30..60 => self.load(),
            60..75 => {
                let plan = faults(&mut self.random);
                self.node().rig.faults[tier].set_plan(plan);
            }
            75..78 => {
                self.node().rig.faults[tier].vanish();
                self.node().vanished[tier] = true;
            }
            78..79 => self.plan.stop_medium(self.at, self.random.u64(0..500)),
            79..84 => self.come_back(),
            84..87 => {
                let digest = self.chunks.key(self.random.u64(0..self.chunks.count)).digest();
                self.node().rig.faults[tier].delete(digest);
            }
            87..91 => self.damage(),
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
            self.node().offered.insert(chunk);
            let stored = self.node().rig.engine.store(&key, &payload);
            self.tally.stored += u64::from(stored == Stored::Staged);
        }
        if self.random.bool() {
            let by = Duration::from_millis(self.random.u64(1..50));
            self.node().rig.engine.flush(by);
        }
    }

    fn load(&mut self) {
        let count = self.random.usize(1..24);
        let chunks: Vec<u64> = (0..count).map(|_| self.any_chunk()).collect();
        let keys: Vec<ChunkKey> = chunks.iter().map(|&chunk| self.chunks.key(chunk)).collect();
        let mut buffers: Vec<_> =
            chunks.iter().map(|&chunk| vec![0xee; self.chunks.bytes_of(chunk)]).collect();
        let looked_up = if self.random.u8(0..4) == 0 { &keys[..count / 2] } else { &keys[..] };
        let lease = self.node().rig.engine.lookup(looked_up);
        let mut wants: Vec<Want<'_>> =
            keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
        let mask = if self.random.u8(0..5) == 0 { self.random.u8(0..8) } else { 7 };
        for want in &mut wants {
            want.tiers = TierMask::from_bits(mask);
        }
        let began = Instant::now();
        let report = self.nodes[self.at].rig.engine.load(&lease, &mut wants);
        let limit = Duration::from_millis(self.plan.config.engine.step_deadline_ms) + SLACK;
        assert!(began.elapsed() < limit, "a load took {:?}", began.elapsed());
        for (chunk, want) in chunks.iter().zip(&wants) {
            if want.outcome.is_hit() {
                let wrong = wrong_bytes(want.key.digest(), want.dest);
                assert_eq!(wrong, 0, "WRONG BYTES of chunk {chunk}: {:?}", want.outcome);
                assert!(self.chunks.offered.contains(chunk), "chunk {chunk} was never stored");
                assert!(!self.chunks.purged.contains(chunk), "chunk {chunk} was purged");
                let is_own = self.nodes[self.at].offered.contains(chunk);
                self.tally.from_others += u64::from(!is_own);
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
        self.node().rig.faults.iter().for_each(FaultHandle::come_back);
        self.node().vanished.fill(false);
    }

    /// Behind the back of a running engine, or of one that rests.
    fn damage(&mut self) {
        let stores = self.plan.stores();
        if !stores.is_empty() {
            let tier = stores[self.random.usize(0..stores.len())];
            let damaged = self.plan.damage(self.at, tier, &mut self.random);
            self.tally.damaged_files += u64::from(damaged);
        }
    }

    fn purge(&mut self) {
        let mut request = PurgeRequest::new(Selector::salt(TENANT));
        request.wait_ms = self.random.u64(0..20);
        let report = self.node().rig.engine.purge(&request).unwrap();
        self.tally.purged += report.tiers.iter().map(|tier| tier.removed_chunks).sum::<u64>();
        // A medium that is away keeps what it holds.
        if report.complete && self.plan.keeps_purges() && !self.node().vanished.contains(&true) {
            let tenants = (0..self.chunks.count).filter(|&chunk| Chunks::is_tenants(chunk));
            self.chunks.purged.extend(tenants);
        }
    }

    fn restart(&mut self) {
        self.quiesce();
        let closed = self.node().rig.engine.close(PATIENCE);
        assert_eq!(closed.leaked_threads, 0, "{closed:?}");
        if self.random.u8(0..4) == 0 {
            self.damage();
        }
        self.plan.lose_power(self.at, &mut self.random);
        self.check_caps();
        let rig = self.plan.open(self.at);
        self.node().rig = rig;
        self.node().vanished.fill(false);
        self.tally.restarts += 1;
    }

    fn check_caps(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            let stats = node.rig.engine.stats();
            let tiers = self.plan.tiers.iter().zip(&stats.tiers).enumerate();
            for (index, (plan, tier)) in tiers.filter(|(_, (plan, _))| !plan.is_shared()) {
                let cap = plan.capacity_bytes;
                assert!(tier.used_bytes <= cap, "{} of {cap} used: {tier:?}", tier.used_bytes);
                let on_disk = disk_bytes(&self.plan.directory(at, index));
                assert!(on_disk <= cap, "{on_disk} bytes on the medium, cap {cap}: {tier:?}");
            }
        }
    }

    /// The leader has counted, and has made room; what dead writers left is gone.
    fn await_shared_caps(&self) {
        for (index, plan) in self.plan.tiers.iter().enumerate().filter(|(_, it)| it.is_shared()) {
            let directory = self.plan.directory(0, index);
            let cap = plan.capacity_bytes;
            self.wait("the cap of the shared directory does not hold", |_, _| {
                shared::chunk_bytes(&directory) <= cap
                    && shared::files(&directory, ".tmp").is_empty()
            });
        }
    }

    /// Without faults everything comes to rest: nothing is held, every fault was counted.
    fn quiesce(&mut self) {
        self.node().rig.faults.iter().for_each(|faults| faults.set_plan(FaultPlan::NONE));
        self.come_back();
        let engine = &self.nodes[self.at].rig.engine;
        assert!(engine.flush(PATIENCE).drained, "{:#?}", engine.stats());
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
        for faults in &self.nodes[self.at].rig.faults {
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
        let (began, rig) = (Instant::now(), &self.nodes[self.at].rig);
        loop {
            // What struck is looked at first: it is counted soon after.
            let stats = rig.engine.stats();
            if is_true(&stats, &rig.faults) {
                return;
            }
            if began.elapsed() > PATIENCE {
                let struck: Vec<_> = rig.faults.iter().map(FaultHandle::counts).collect();
                panic!("{what}: {stats:#?}\nstruck: {struck:?}");
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(&mut self) {
        for at in 0..self.nodes.len() {
            self.at = at;
            self.quiesce();
            self.load();
        }
        // A load may be followed by stores.
        for node in &self.nodes {
            node.rig.engine.flush(PATIENCE);
        }
        self.await_shared_caps();
        for node in &self.nodes {
            let closed = node.rig.engine.close(PATIENCE);
            assert!(closed.drained && closed.leaked_threads == 0, "{closed:?}");
        }
        self.check_caps();
        if self.random.u8(0..4) == 0 && !self.plan.stores().is_empty() {
            self.check_repair();
        }
    }

    /// What was repaired is clean.
    fn check_repair(&mut self) {
        let config = self.plan.config_of_stores(self.at);
        let fsck = |repair: bool| {
            let mut offline = Offline::open(config.clone()).unwrap();
            let mut options = CheckOptions::default();
            options.repair = repair;
            check(&mut offline, &options, &mut || true).unwrap()
        };
        self.damage();
        let first = fsck(true);
        let second = fsck(false);
        assert!(second.is_clean(), "after a repair: {second:#?}\nwhich found: {first:#?}");
        self.tally.repairs += 1;
        self.tally.repaired += u64::from(!first.is_clean());
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
