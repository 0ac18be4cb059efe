//! The engine of a run, over tiers that can be made to fail.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use kv_connector::{ByteSize, Config, Engine, TailPolicy, TierConfig, now_ns};
use kv_tiers::{
    FaultHandle, FaultKind, FaultPlan, Faulty, IoMode, MemoryConfig, MemoryTier, NvmeConfig,
    NvmeTier, Tier, When,
};
use tempfile::TempDir;

/// What a tier of a run is.
#[derive(Clone, Debug)]
pub(crate) struct TierPlan {
    pub(crate) files: bool,
    pub(crate) capacity_bytes: u64,
    segment_bytes: u64,
    allow: IoMode,
}

/// Everything that an engine is opened from, again and again.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) config: Config,
    pub(crate) tiers: Vec<TierPlan>,
    pub(crate) sizes: Vec<usize>,
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
            files: random.u8(0..5) < 2,
            capacity_bytes: random.u64(12..60) * (unit as u64 + 8_192) + (1 << 20),
            segment_bytes: random.u64(2..8) * (unit as u64 + 8_192),
            allow,
        };
        let tiers: Vec<TierPlan> = (0..random.usize(1..=3)).map(|_| tier(random)).collect();
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
        engine.write_max_age_ms = random.u64(1..10);
        engine.write_back_off_ms = random.u64(1..10);
        engine.close_deadline_ms = 20_000;
        engine.scrub_bytes_per_s = ByteSize(if random.bool() { 0 } else { 64 << 20 });
        let tails = [TailPolicy::Whole, TailPolicy::Duplicate, TailPolicy::SplitAndDuplicate];
        engine.tail = tails[random.usize(0..3)];
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        Self { config, tiers, sizes, root }
    }

    pub(crate) fn directory(&self, tier: usize) -> PathBuf {
        self.root.path().join(format!("t{tier}"))
    }

    /// Opens an engine over what is there, with no faults yet.
    pub(crate) fn open(&self) -> Rig {
        let arenas = Engine::arenas(&self.config).unwrap();
        let registered = [Arc::clone(&arenas.reads), Arc::clone(&arenas.staging)];
        let open = |(index, plan): (usize, &TierPlan)| {
            let name = format!("t{index}");
            let inner: Box<dyn Tier> = if plan.files {
                let mut config = NvmeConfig::new(name, self.directory(index), plan.capacity_bytes);
                config.segment_bytes = Some(plan.segment_bytes);
                (config.ring_entries, config.threads, config.allow) = (16, 2, plan.allow);
                Box::new(NvmeTier::open(config, &registered, now_ns()).expect("a store opens"))
            } else {
                Box::new(MemoryTier::new(MemoryConfig::new(name, plan.capacity_bytes)))
            };
            Faulty::new(inner, FaultPlan::NONE)
        };
        let tiers: Vec<Faulty> = self.tiers.iter().enumerate().map(open).collect();
        let faults = tiers.iter().map(Faulty::handle).collect();
        let tiers = tiers.into_iter().map(|tier| Box::new(tier) as Box<dyn Tier>).collect();
        let engine = Engine::with_tiers(self.config.clone(), arenas, tiers).unwrap();
        Rig { engine, faults }
    }

    /// Tiers whose directories exist.
    pub(crate) fn stores(&self) -> Vec<usize> {
        (0..self.tiers.len()).filter(|&tier| self.tiers[tier].files).collect()
    }

    /// Deletes, cuts or rots a file of a tier behind its back. False: there is none.
    pub(crate) fn damage(&self, tier: usize, random: &mut fastrand::Rng) -> bool {
        let Ok(entries) = fs::read_dir(self.directory(tier)) else { return false };
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

fn rot(file: &File, length: u64, random: &mut fastrand::Rng) {
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
