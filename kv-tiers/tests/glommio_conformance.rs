//! The NVMe tier keeps the contract of a tier with glommio's I/O too.

#![cfg(feature = "glommio")]
#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "what the machine cannot do is shown")]

mod nvme_support;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kv_tiers::{
    Arena, ArenaConfig, IoEngine, IoMode, NvmeConfig, NvmeTier, Tier,
    conformance::{self, Harness, Open},
};
use nvme_support::{MIB, on_disk};

fn config(directory: &std::path::Path, engine: IoEngine) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, 32 * MIB);
    config.segment_bytes = Some(4 * MIB);
    config.payload_bytes_max = 2 * MIB + 5;
    config.queue_ops_max = 6;
    config.engine = engine;
    config
}

/// False, and said so, where glommio cannot work.
fn can_glommio() -> bool {
    let directory = on_disk();
    match NvmeTier::open(config(directory.path(), IoEngine::Glommio), &[], 0) {
        Ok(_) => true,
        Err(error) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            println!("SKIP glommio: {error}: {}", cause.unwrap_or_default());
            false
        }
    }
}

#[test]
fn glommio_keeps_the_contract() {
    if !can_glommio() {
        return;
    }
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    let arenas = [Arc::clone(&arena)];
    let mut directory = on_disk();
    let mut opened = 0;
    let mut open = |open| {
        if open == Open::Fresh {
            directory = on_disk();
        }
        // Every other reopening by the tier's own I/O: the files are the same.
        opened += 1;
        let own = open == Open::Reopen && opened % 2 == 0;
        let engine = if own { IoEngine::Own } else { IoEngine::Glommio };
        let tier = NvmeTier::open(config(directory.path(), engine), &arenas, 0)?;
        if !own {
            let IoMode { ring, direct, registered_buffers, .. } = tier.stats().io_mode;
            assert!(ring && direct && !registered_buffers);
        }
        let tier: Box<dyn Tier> = Box::new(tier);
        Ok(tier)
    };
    let start = Instant::now();
    let mut clock = |_| {
        thread::sleep(Duration::from_micros(50));
        u64::try_from(start.elapsed().as_nanos()).unwrap()
    };
    let report = conformance::run(&mut Harness::new(&mut open, arena, &mut clock))
        .unwrap_or_else(|broken| panic!("{broken}"));
    println!("{report}");
    assert_eq!(report.skipped, []);
}
