//! Memory: how much an engine takes, what limits it, whether it lies on huge pages, and whether it may be locked.

use std::fs;

use kv_tiers::{Arena, ArenaConfig};
use nix::sys::resource::{Resource, getrlimit};

use super::{Diagnosis, machine::may_lock_memory};
use crate::{ByteSize, Config, TierConfig, TierKind, arenas::Arenas, config::memory};

/// Enough to see whether the system grants huge pages.
const TRIAL_BYTES: usize = 32 << 20;

pub(super) fn examine(diagnosis: &mut Diagnosis, config: Option<&Config>) {
    huge_pages(diagnosis);
    let Some(config) = config else { return };
    let needs = Needs::of(config);
    limits(diagnosis, &needs);
    memlock(diagnosis, config, &needs);
}

/// What an engine of this configuration takes.
struct Needs {
    /// Arenas, which rings register.
    arenas: u64,
    /// With tiers in memory and the queue of loads.
    all: u64,
}

impl Needs {
    fn of(config: &Config) -> Self {
        let (reads, staging) = Arenas::bytes(config);
        let arenas = reads.saturating_add(staging);
        let in_memory = |tier: &TierConfig| {
            let capacity = tier.capacity.unwrap_or_default();
            match tier.kind {
                TierKind::Memory => capacity.0,
                TierKind::Flash => tier.flash.clone().unwrap_or_default().protected_bytes(capacity),
                _ => 0,
            }
        };
        let tiers = config.tiers.iter().map(in_memory).fold(0_u64, u64::saturating_add);
        let slots = config.queue.slots(config.engine.chunk_bytes_max) as u64;
        let queue = slots.saturating_mul(config.engine.chunk_bytes_max.0);
        Self { arenas, all: arenas.saturating_add(tiers).saturating_add(queue) }
    }
}

fn huge_pages(diagnosis: &mut Diagnosis) {
    let what = "huge pages";
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let setting = setting.unwrap_or_default();
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or("unknown").to_owned();
    let Ok(arena) = Arena::new(ArenaConfig::new(TRIAL_BYTES, 1)) else {
        let found = format!("{} of memory cannot be had", ByteSize(TRIAL_BYTES as u64));
        diagnosis.fail(what, found, ("an engine does not open without", "give it more memory"));
        return;
    };
    let stats = arena.stats();
    let got = ByteSize(stats.huge_page_bytes);
    let found = format!(
        "transparent_hugepage is `{chosen}`; a trial of {} got {got} on them",
        ByteSize(stats.bytes)
    );
    if stats.huge_page_bytes >= stats.bytes {
        diagnosis.ok(what, found);
        return;
    }
    let fix = match &*chosen {
        "never" => "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (on the host)",
        _ => {
            "free memory is fragmented or short: start the engine early, or compact it (vm.compact_memory)"
        }
    };
    let why = "on small pages a device takes smaller requests: reads were half as fast in a trial";
    diagnosis.warn(what, found, (why, fix));
}

fn limits(diagnosis: &mut Diagnosis, needs: &Needs) {
    let what = "memory";
    let wanted = ByteSize(needs.all);
    let limit = memory::cgroup_limit();
    if let Some(limit) = limit.filter(|limit| needs.all > *limit) {
        let found = format!("{wanted} wanted, the container's limit is {}", ByteSize(limit));
        let why = "all of it is touched at open: the kernel would end the process";
        let fix =
            "raise the container's memory limit, or lower host_cache, staging and [queue] memory";
        diagnosis.fail(what, found, (why, fix));
        return;
    }
    let within = limit.map_or_else(
        || "no limit of a container".to_owned(),
        |limit| format!("the container's limit is {}", ByteSize(limit)),
    );
    match memory::available() {
        Some(available) if needs.all > available => {
            let found = format!("{wanted} wanted, {} available now", ByteSize(available));
            let why = "all of it is touched at open: others are swapped out, or ended";
            diagnosis.warn(what, found, (why, "lower host_cache, staging and [queue] memory"));
        }
        _ => diagnosis.ok(what, format!("{wanted} wanted; {within}")),
    }
}

fn memlock(diagnosis: &mut Diagnosis, config: &Config, needs: &Needs) {
    let what = "locked memory";
    let rings = config.tiers.iter().filter(|tier| tier.kind == TierKind::Nvme).count() as u64;
    let locks = u64::from(config.engine.lock_memory);
    let wanted = needs.arenas.saturating_mul(rings + locks);
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    if wanted == 0 {
        return;
    }
    if may_lock_memory() || limit == u64::MAX {
        diagnosis.ok(what, format!("{} may be registered and locked: no limit", ByteSize(wanted)));
        return;
    }
    let found = format!(
        "RLIMIT_MEMLOCK is {}; {rings} rings register {} each{}",
        ByteSize(limit),
        ByteSize(needs.arenas),
        if config.engine.lock_memory { ", and lock_memory asks for as much" } else { "" },
    );
    if wanted <= limit {
        diagnosis.ok(what, found);
        return;
    }
    let why = "buffers are not registered: each read pins its pages anew, which costs CPU time";
    let fix = "ulimit -l unlimited, LimitMEMLOCK=infinity of the unit, or --ulimit memlock=-1 of the container";
    diagnosis.warn(what, found, (why, fix));
}
