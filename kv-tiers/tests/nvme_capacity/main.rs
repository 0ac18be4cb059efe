//! A store under many times its cap of writes: the disk space it takes at any time, what it keeps, what it writes for
//! that, and how a second model comes to its share.
//!
//! `KVBRAID_CAPACITY_MIB` is the cap (16 by default); 50 caps are written. Every byte that is read is compared.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "figures are printed")]

mod load;
#[path = "../nvme_support/mod.rs"]
mod nvme_support;
mod rig;
mod watch;

use std::{env, path::Path};

use kv_tiers::NvmeConfig;

use self::{
    load::{Lru, Model},
    nvme_support::{MIB, du, on_disk},
    rig::Rig,
    watch::{Watch, written_to_disk},
};

/// Caps of the first model that are written.
const CAPS: u64 = 50;

fn cap() -> u64 {
    let mib = env::var("KVBRAID_CAPACITY_MIB").map_or(16, |text| text.parse().unwrap());
    mib * MIB
}

fn config(directory: &Path, cap: u64) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, cap);
    (config.high_watermark_permille, config.low_watermark_permille) = (980, 960);
    config
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

fn mib(bytes: u64) -> u64 {
    bytes / MIB
}

/// One model alone, with requests that go on with earlier conversations.
fn first_model(rig: &mut Rig, model: &mut Model, cap: u64, watch: &Watch) {
    let record_bytes = kv_tiers::record_bytes(model.payload_bytes);
    let mut lru = Lru::new(cap / record_bytes);
    let before = written_to_disk();
    for part in 1..=5 {
        while rig.written(model) < part * CAPS * cap / 5 {
            let request = model.request();
            lru.serve(&request);
            rig.serve(model, &request);
        }
        rig.settle();
        println!(
            "FIGURE {} MiB written: {:.1} % of the chunks asked for were held ({:.1} % of those asked for again; LRU by \
             itself {:.1} %), du at most {:.4} of the cap",
            mib(rig.written(model)),
            percent(rig.hits(model), model.asked),
            percent(rig.hits(model), model.asked - model.new),
            percent(lru.hits, model.asked),
            watch.most() as f64 / cap as f64,
        );
        watch.check(cap);
    }
    let (hits, lru_hits) = (rig.hits(model), lru.hits);
    assert!(hits * 10 >= lru_hits * 9, "{hits} hits, and {lru_hits} of LRU");
    assert!(hits * 10 >= model.asked, "{hits} of {}: the load reads nothing again", model.asked);
    if let (Some(before), Some(after)) = (before, written_to_disk()) {
        let amplification = (after - before) as f64 / rig.written(model) as f64;
        println!(
            "FIGURE write amplification: {amplification:.4} (bytes to the disk for each byte of payload)"
        );
        // A header, a wiped header, padding, and the journal.
        let chunk = model.payload_bytes as f64;
        let bound = 1.05 + 16_384.0 / chunk;
        assert!((1.0..bound).contains(&amplification), "{amplification} of {bound}");
    } else {
        println!("SKIP write amplification: the kernel does not account for it here");
    }
}

/// A second model joins, in equal bytes, then it is alone; bytes of both over time.
fn second_model(rig: &mut Rig, (first, second): (&mut Model, &mut Model), cap: u64, watch: &Watch) {
    let shares = |rig: &Rig, first: &Model, second: &Model| {
        let held = [rig.held(first), rig.held(second)];
        println!(
            "FIGURE {} and {} MiB written: the first model holds {:.1} % of the cap, the second {:.1} %",
            mib(rig.written(first)),
            mib(rig.written(second)),
            percent(held[0], cap),
            percent(held[1], cap),
        );
        held
    };
    let (begin, mut held) = (rig.written(first), 0);
    for half in 1..=4 {
        while rig.written(second) < half * cap / 2 {
            let is_behind = rig.written(second) <= rig.written(first) - begin;
            let model = if is_behind { &mut *second } else { &mut *first };
            let request = model.request();
            rig.serve(model, &request);
        }
        rig.settle();
        [_, held] = shares(rig, first, second);
        watch.check(cap);
    }
    assert!(held >= cap / 3, "after twice the cap of the second model it holds {held} of {cap}");
    while rig.written(second) < 4 * cap {
        let request = second.request();
        rig.serve(second, &request);
    }
    rig.settle();
    let [_, held] = shares(rig, first, second);
    assert!(held >= cap / 2, "alone for twice the cap, the second model holds {held} of {cap}");
}

#[test]
fn the_cap_holds_under_fifty_times_its_writes_and_a_second_model_gets_its_share() {
    let cap = cap();
    let directory = on_disk();
    let watch = Watch::start(directory.path());
    let mut rig = Rig::open(config(directory.path(), cap), cap / 256);
    let mut first = Model::new(1, cap / 256 - 1000);
    let mut second = Model::new(2, cap / 256 * 3 / 8 - 1000);
    first_model(&mut rig, &mut first, cap, &watch);
    second_model(&mut rig, (&mut first, &mut second), cap, &watch);
    assert!(rig.verified_bytes > cap, "{} bytes were read", rig.verified_bytes);

    // All that is held, as the next start finds it.
    let held = rig.chunks();
    let mut rig = rig.reopen(config(directory.path(), cap));
    assert_eq!(rig.chunks(), held);
    rig.check_all(&[first, second]);
    drop(rig);
    watch.check(cap);
    let (most, samples) = watch.stop();
    println!("FIGURE du at most {:.4} of the cap in {samples} looks", most as f64 / cap as f64);
    assert!(samples > 100, "{samples} looks");
    assert!(most * 2 > cap, "{most} bytes: the looks see nothing");
    assert!(du(directory.path()) <= cap);
}
