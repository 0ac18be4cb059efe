//! The engine of a run, over tiers that can be made to fail.

use std::{
    cell::RefCell,
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use kv_connector::{ByteSize, Config, Engine, TailPolicy, TierConfig, now_ns};
use kv_tiers::{
    Crash, CrashImage, Crashing, FaultHandle, FaultKind, FaultPlan, Faulty, FlushPolicy, IoMode,
    MemoryConfig, MemoryTier, NvmeConfig, NvmeTier, SharedConfig, SharedTier, Tier, When,
};
use tempfile::TempDir;

use crate::shared;

/// What a tier of a run is.
#[derive(Clone, Debug)]
pub(crate) struct TierPlan {
    pub(crate) medium: Medium,
    pub(crate) capacity_bytes: u64,
    segment_bytes: u64,
    allow: IoMode,
}

#[derive(Clone, Debug)]
pub(crate) enum Medium {
    Memory,
    /// Memory of each node that loses what was not flushed.
    Crashes(RefCell<Vec<CrashImage>>),
    /// A directory of each node.
    Files,
    /// A directory of all nodes.
    Shared(Pace),
}

/// How quickly the nodes of a shared directory notice each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    lease_ttl: Duration,
    count_every: Duration,
    stale_after: Duration,
    absent_ttl_ns: u64,
}

/// Everything that an engine is opened from, again and again.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) config: Config,
    pub(crate) tiers: Vec<TierPlan>,
    pub(crate) sizes: Vec<usize>,
    /// Engines that live at once, each over tiers of its own but for the shared ones.
    pub(crate) nodes: usize,
    root: TempDir,
}

impl Plan {
    pub(crate) fn new(random: &mut fastrand::Rng) -> Self {
        let large = random.u8(0..12) == 0;
        let (unit, sizes) = if large {
            (2_300_000, vec![(1 << 20) + 1, 2_300_000, 70_000])
        } else {
            (65_536, vec![1, 4_096, 4_097, 20_000, 65_536])
        };
        let mut sizes: Vec<usize> =
            sizes.into_iter().filter(|_| random.bool()).chain([unit]).collect();
        sizes.dedup();
        let mut allow = IoMode::ALL;
        (allow.ring, allow.direct) = (random.u8(0..4) > 0, random.bool());
        allow.registered_buffers = random.bool();
        let tier = |random: &mut fastrand::Rng| TierPlan {
            medium: Medium::any(random),
            capacity_bytes: random.u64(12..60) * (unit as u64 + 8_192) + (1 << 20),
            segment_bytes: random.u64(2..8) * (unit as u64 + 8_192),
            allow,
        };
        let tiers: Vec<TierPlan> = (0..random.usize(1..=3)).map(|_| tier(random)).collect();
        let shares = tiers.iter().any(TierPlan::is_shared);
        let nodes = if shares && random.u8(0..8) > 0 { 2 } else { 1 };
        let section = |(index, tier): (usize, &TierPlan)| {
            let name = format!("t{index}");
            TierConfig::memory(&name, ByteSize(tier.capacity_bytes))
        };
        let mut config = Config::new(tiers.iter().enumerate().map(section).collect());
        for tier in &mut config.tiers {
            tier.window = random.bool().then(|| random.u32(1..6));
            tier.write_window = random.u32(1..4);
        }
        let engine = &mut config.engine;
        let slot = unit as u64 + 8_192;
        engine.chunk_bytes_max = ByteSize(unit as u64);
        engine.host_cache = ByteSize(if random.bool() { 0 } else { 6 * slot });
        engine.staging = ByteSize(random.u64(3..16) * slot);
        engine.read_buffer = Some(ByteSize(random.u64(8..20) * slot));
        engine.cache_stores = random.bool();
        engine.read_deadline_ms = random.u64(20..60);
        engine.step_deadline_ms = random.u64(60..400);
        engine.lookup_wait_ms = random.u64(1..30);
        engine.write_max_age_ms = random.u64(1..10);
        engine.write_back_off_ms = random.u64(1..10);
        engine.close_deadline_ms = 20_000;
        engine.scrub_bytes_per_s = ByteSize(if random.bool() { 0 } else { 64 << 20 });
        let tails = [TailPolicy::Whole, TailPolicy::Duplicate, TailPolicy::SplitAndDuplicate];
        engine.tail = tails[random.usize(0..3)];
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        Self { config, tiers, sizes, nodes, root }
    }

    pub(crate) fn directory(&self, node: usize, tier: usize) -> PathBuf {
        let is_shared = self.tiers[tier].is_shared();
        let name = if is_shared { format!("t{tier}") } else { format!("t{tier}n{node}") };
        self.root.path().join(name)
    }

    /// What is purged for good: a removal may come undone with the power, and other nodes have chunks of their own.
    pub(crate) fn keeps_purges(&self) -> bool {
        self.tiers.iter().all(|tier| matches!(tier.medium, Medium::Memory | Medium::Files))
    }

    /// Opens the engine of a node over what is there, with no faults yet.
    pub(crate) fn open(&self, node: usize) -> Rig {
        let arenas = Engine::arenas(&self.config).unwrap();
        let registered = [Arc::clone(&arenas.reads), Arc::clone(&arenas.staging)];
        let open = |(index, plan): (usize, &TierPlan)| {
            let name = format!("t{index}");
            let memory = MemoryConfig::new(&name, plan.capacity_bytes);
            let inner: Box<dyn Tier> = match &plan.medium {
                Medium::Memory => Box::new(MemoryTier::new(memory)),
                Medium::Crashes(images) => {
                    let image = images.borrow()[node].clone();
                    let mut memory = memory;
                    memory.payload_bytes_max = self.config.engine.chunk_bytes_max.0;
                    Box::new(Crashing::open(image, memory, FlushPolicy::Never))
                }
                Medium::Files => {
                    let directory = self.directory(node, index);
                    let mut config = NvmeConfig::new(name, directory, plan.capacity_bytes);
                    config.segment_bytes = Some(plan.segment_bytes);
                    (config.ring_entries, config.threads, config.allow) = (16, 2, plan.allow);
                    Box::new(NvmeTier::open(config, &registered, now_ns()).expect("a store opens"))
                }
                Medium::Shared(pace) => {
                    let config = self.shared(index, *pace);
                    Box::new(SharedTier::open(config, now_ns()).expect("a store opens"))
                }
            };
            Faulty::new(inner, FaultPlan::NONE)
        };
        let tiers: Vec<Faulty> = self.tiers.iter().enumerate().map(open).collect();
        let faults = tiers.iter().map(Faulty::handle).collect();
        let tiers = tiers.into_iter().map(|tier| Box::new(tier) as Box<dyn Tier>).collect();
        let engine = Engine::with_tiers(self.config.clone(), arenas, tiers).unwrap();
        Rig { engine, faults }
    }

    fn shared(&self, tier: usize, pace: Pace) -> SharedConfig {
        let (capacity, node) = (self.tiers[tier].capacity_bytes, fastrand::u64(1..));
        let mut config =
            SharedConfig::new(format!("t{tier}"), self.directory(0, tier), capacity, node);
        (config.threads, config.lookup_threads) = (3, 2);
        (config.lease_ttl, config.count_every) = (pace.lease_ttl, pace.count_every);
        (config.stale_after, config.absent_ttl_ns) = (pace.stale_after, pace.absent_ttl_ns);
        config
    }

    /// The tiers of files of one node, as the tools are told of them.
    pub(crate) fn config_of_stores(&self, node: usize) -> Config {
        let section = |tier: usize| {
            let TierPlan { capacity_bytes, segment_bytes, .. } = self.tiers[tier];
            let (name, path) = (format!("t{tier}"), self.directory(node, tier));
            if self.tiers[tier].is_shared() {
                return TierConfig::shared(&name, path, ByteSize(capacity_bytes));
            }
            let mut section = TierConfig::nvme(&name, path, ByteSize(capacity_bytes));
            section.segment = Some(ByteSize(segment_bytes));
            section
        };
        let mut config = Config::new(self.stores().into_iter().map(section).collect());
        config.engine = self.config.engine.clone();
        config
    }

    /// The power of a closed node fails: of what was not flushed some is lost.
    pub(crate) fn lose_power(&self, node: usize, random: &mut fastrand::Rng) {
        for tier in &self.tiers {
            if let Medium::Crashes(images) = &tier.medium {
                let seed = random.u64(..);
                let crash = if random.bool() { Crash::Process } else { Crash::Power { seed } };
                let image = images.borrow()[node].crash(crash);
                images.borrow_mut()[node] = image;
            }
        }
    }

    /// A medium of the node writes so many more grains, and then nothing.
    pub(crate) fn stop_medium(&self, node: usize, grains: u64) {
        for tier in &self.tiers {
            if let Medium::Crashes(images) = &tier.medium {
                images.borrow()[node].stop_after_grains(grains);
            }
        }
    }

    /// Tiers whose directories exist.
    pub(crate) fn stores(&self) -> Vec<usize> {
        let has_files =
            |tier: &usize| matches!(self.tiers[*tier].medium, Medium::Files | Medium::Shared(_));
        (0..self.tiers.len()).filter(has_files).collect()
    }

    /// Deletes, cuts or rots a file of a tier behind its back. False: there is none.
    pub(crate) fn damage(&self, node: usize, tier: usize, random: &mut fastrand::Rng) -> bool {
        let directory = self.directory(node, tier);
        if self.tiers[tier].is_shared() {
            return shared::damage(&directory, random);
        }
        let Ok(entries) = fs::read_dir(directory) else { return false };
        let paths = entries.map(|entry| entry.unwrap().path());
        let mut paths: Vec<_> = paths.filter(|path| !path.ends_with("LOCK")).collect();
        paths.sort();
        if paths.is_empty() {
            return false;
        }
        let path = &paths[random.usize(0..paths.len())];
        let Ok(file) = File::options().read(true).write(true).open(path) else { return false };
        let length = file.metadata().unwrap().len();
        match random.u8(0..4) {
            0 => fs::remove_file(path).unwrap(),
            1 => file.set_len(random.u64(0..=length)).unwrap(),
            _ => rot(&file, length, random),
        }
        true
    }
}

impl TierPlan {
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.medium, Medium::Shared(_))
    }
}

impl Medium {
    fn any(random: &mut fastrand::Rng) -> Self {
        let ms = |random: &mut fastrand::Rng, range| Duration::from_millis(random.u64(range));
        match random.u8(0..10) {
            0..3 => Self::Memory,
            3..5 => Self::Crashes(RefCell::new(vec![CrashImage::new(512), CrashImage::new(512)])),
            5..8 => Self::Files,
            _ => Self::Shared(Pace {
                lease_ttl: ms(random, 60..200),
                count_every: ms(random, 20..400),
                stale_after: ms(random, 200..2_000),
                absent_ttl_ns: random.u64(1_000_000..100_000_000),
            }),
        }
    }
}

pub(crate) fn rot(file: &File, length: u64, random: &mut fastrand::Rng) {
    for _ in 0..random.u32(1..20) {
        let (at, mut byte) = (random.u64(0..length.max(1)), [0]);
        // Beyond the end of a file that was cut there is nothing to rot.
        if file.read_exact_at(&mut byte, at).is_ok() {
            file.write_all_at(&[byte[0] ^ (1 << random.u8(0..8))], at).unwrap();
        }
    }
}

/// An engine and the strings to its tiers.
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) faults: Vec<FaultHandle>,
}

/// Some faults, each now and then.
pub(crate) fn faults(random: &mut fastrand::Rng) -> FaultPlan {
    let kinds = [
        FaultKind::ReadFails,
        FaultKind::ReadStopsShort,
        FaultKind::ReadIsTruncated,
        FaultKind::ReadFlipsBit,
        FaultKind::ReadFindsItDeleted,
        FaultKind::WriteFails,
        FaultKind::WriteFindsNoSpace,
        FaultKind::WriteTears,
        FaultKind::WriteTearsUnseen,
        FaultKind::WriteFlipsBit,
        FaultKind::Stalls { ns: random.u64(1_000_000..90_000_000) },
    ];
    let mut plan = FaultPlan::NONE.seeded(random.u64(..));
    for kind in kinds {
        if random.u8(0..3) > 0 {
            continue;
        }
        let when = match random.u8(0..3) {
            0 => When::Nth(random.u64(1..20)),
            1 => When::Every(random.u64(3..30)),
            _ => When::Probability(random.f64() * 0.3),
        };
        plan = plan.with(kind, when);
    }
    // A whole medium of one kind, now and then.
    if random.u8(0..10) == 0 {
        plan = FaultPlan::NONE.with(kinds[random.usize(0..10)], When::Every(1)).seeded(1);
    }
    plan
}

/// What a directory takes on the medium, as `du` counts; what vanishes meanwhile takes nothing.
pub(crate) fn disk_bytes(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let blocks = |it: std::io::Result<fs::Metadata>| it.map_or(0, |it| it.blocks() * 512);
    let own = blocks(fs::metadata(directory));
    own + entries.map(|entry| blocks(entry.unwrap().metadata())).sum::<u64>()
}
