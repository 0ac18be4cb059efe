//! What an NVMe tier does with its space: room ahead of writes, a floor of free space, sizes that share the cap.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

mod nvme_support;

use std::{cell::RefCell, collections::HashSet, env, fs, path::Path, process::Command};

use kv_chunk::Digest;
use kv_tiers::{EvictionGuard, NvmeConfig, Tier};
use nvme_support::{Driver, KIB, MIB, digest, du, on_disk};

struct Leased(HashSet<Digest>);

impl EvictionGuard for Leased {
    fn try_evict(&self, victim: Digest) -> bool {
        !self.0.contains(&victim)
    }
}

/// Slots of 8 KiB in segments of 64.
fn many_slots(directory: &Path) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, 4 * MIB);
    config.segment_bytes = Some(64 * 8 * KIB + 4 * KIB);
    config
}

/// Fills the store with chunks until one is evicted; how many there are.
fn fill(driver: &mut Driver, bytes: u64) -> u32 {
    for number in 0.. {
        if !driver.evicted.is_empty() {
            return number;
        }
        driver.write(number, bytes);
    }
    unreachable!("a store is finite")
}

/// Remembers when it was asked.
struct Watched<'a>(&'a RefCell<Vec<Digest>>);

impl EvictionGuard for Watched<'_> {
    fn try_evict(&self, victim: Digest) -> bool {
        self.0.borrow_mut().push(victim);
        true
    }
}

#[test]
fn room_is_made_ahead_of_writes_a_little_in_each_poll() {
    let directory = on_disk();
    let mut config = many_slots(directory.path());
    (config.high_watermark_permille, config.low_watermark_permille) = (950, 900);
    let mut driver = Driver::open(config);
    let count = fill(&mut driver, 4 * KIB);
    assert!(count > 300, "{count}");
    driver.settle();
    let held = driver.tier.stats().chunks;
    assert!(
        held < u64::from(count) * 93 / 100,
        "{held} of {count}: the drain went down to the low mark"
    );
    // What is written next finds room, and asks for no eviction: it has a free slot in the poll that starts it.
    let evicted = driver.evicted.len();
    let asked = RefCell::new(Vec::new());
    for number in 10_000..10_010 {
        driver.submit_write(number, 4 * KIB);
        driver.poll(&Watched(&asked));
    }
    driver.settle_with(&Watched(&asked));
    assert_eq!((asked.borrow().len(), driver.evicted.len()), (0, evicted));
    // Many writes: in one poll no more than a few are dropped ahead.
    for number in 20_000..20_200 {
        driver.write(number, 4 * KIB);
        let before = driver.evicted.len();
        driver.poll(&kv_tiers::Unguarded);
        assert!(driver.evicted.len() - before <= 8);
    }
    assert!(du(directory.path()) <= 4 * MIB);
}

#[test]
fn leased_chunks_stay_when_room_is_made_ahead() {
    let directory = on_disk();
    let mut config = many_slots(directory.path());
    (config.high_watermark_permille, config.low_watermark_permille) = (900, 500);
    let mut driver = Driver::open(config);
    let leased = Leased((0..100).map(digest).collect());
    for number in 0..1000 {
        driver.submit_write(number, 4 * KIB);
        driver.poll(&leased);
        if number % 8 == 0 {
            driver.settle_with(&leased);
        }
    }
    driver.settle_with(&leased);
    assert_eq!(driver.held(0..100).len(), 100);
    assert!(driver.evicted.len() > 300);
}

/// Two models, one after the other: bytes of the second that are held once twice the cap of it was written.
#[test]
fn another_chunk_size_gets_its_share_and_leased_chunks_survive() {
    for (first, second) in [(60 * KIB, 252 * KIB), (252 * KIB, 60 * KIB), (28 * KIB, 32 * KIB)] {
        let directory = on_disk();
        let cap = 16 * MIB;
        let mut config = NvmeConfig::new("nvme", directory.path(), cap);
        config.segment_bytes = Some(MIB);
        let mut driver = Driver::open(config);
        let count = fill(&mut driver, first);
        // Read lately, by requests that still hold them: chunks of a few segments.
        let numbers: Vec<u32> = driver.held(0..count).into_iter().take(6).collect();
        numbers.iter().for_each(|&number| driver.check(number, first));
        let leased = Leased(numbers.iter().copied().map(digest).collect());
        let mut written = 0;
        let mut number = 100_000;
        while written < 2 * cap {
            driver.submit_write(number, second);
            driver.settle_quickly(&leased);
            number += 1;
            written += second;
            assert!(du(directory.path()) <= cap);
        }
        let held = driver.held(100_000..number).len() as u64 * second;
        let rest = driver.held(0..count).len();
        let stats = (driver.tier.stats(), driver.tier.detail());
        assert!(
            held >= cap / 2,
            "{held} bytes of {second} after {first}: {rest} of {count}, {stats:?}"
        );
        numbers.iter().for_each(|&number| driver.check(number, first));
    }
}

/// Two models at once, in equal bytes, the second one late: neither starves.
#[test]
fn sizes_that_are_written_side_by_side_share_the_cap() {
    let directory = on_disk();
    let cap = 16 * MIB;
    let mut config = NvmeConfig::new("nvme", directory.path(), cap);
    config.segment_bytes = Some(MIB);
    let mut driver = Driver::open(config);
    let sizes = [28 * KIB, 60 * KIB];
    fill(&mut driver, sizes[0]);
    let mut written = [0, 0];
    while written[0] + written[1] < 4 * cap {
        let late = usize::from(written[1] < written[0]);
        let number = 100_000 * (1 + u32::try_from(late).unwrap())
            + u32::try_from(written[late] / sizes[late]).unwrap();
        driver.submit_write(number, sizes[late]);
        driver.settle_quickly(&kv_tiers::Unguarded);
        written[late] += sizes[late];
    }
    let held = [0, 1].map(|at| {
        let from = 100_000 * (1 + u32::try_from(at).unwrap());
        driver.held(from..from + 10_000).len() as u64 * sizes[at]
    });
    assert!(held.iter().all(|bytes| *bytes > cap / 5), "{held:?} of {cap}");
}

/// Set in a child process: the directory it shall use.
const CHILD: &str = "KV_TIERS_NVME_CHILD";

fn available(directory: &Path) -> u64 {
    let about = nix::sys::statvfs::statvfs(directory).unwrap();
    about.blocks_available() * about.fragment_size()
}

#[test]
fn the_file_system_keeps_its_floor_of_free_space() {
    const FLOOR: u64 = 12 * MIB;
    if let Some(directory) = env::var_os(CHILD) {
        // 32 MiB of file system below a cap of 128 MiB.
        let place = Path::new(&directory).join("store");
        let mut config = NvmeConfig::new("nvme", &place, 128 * MIB);
        config.segment_bytes = Some(2 * MIB);
        config.min_free_bytes = FLOOR;
        let mut driver = Driver::open(config);
        for number in 0..40 {
            driver.write(number, MIB / 2);
            assert!(available(&place) >= FLOOR, "{} after {number}", available(&place));
        }
        let held = driver.held(0..40);
        assert!(held.len() > 20, "{held:?}");
        // Somebody else takes space: the next writes give back as much.
        fs::write(place.with_file_name("others"), vec![1; 6 << 20]).unwrap();
        assert!(available(&place) < FLOOR);
        (100..104).for_each(|number| driver.write(number, MIB / 2));
        driver.settle();
        assert!(available(&place) >= FLOOR, "{}", available(&place));
        assert!(driver.tier.stats().chunks > 8);
        (100..104).for_each(|number| driver.check(number, MIB / 2));
        return;
    }
    let directory = on_disk();
    let mount = "mount -t tmpfs -o size=32m none \"$KV_TIERS_NVME_CHILD\" && exec \"$0\" \"$@\"";
    let output = Command::new("unshare")
        .args(["-rm", "sh", "-c", mount])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "the_file_system_keeps_its_floor_of_free_space", "--nocapture"])
        .env(CHILD, directory.path())
        .output();
    match output {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
        }
        Err(error) => println!("SKIP floor of free space: unshare: {error}"),
    }
}
