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

    fn may_evict(&self, victim: Digest) -> bool {
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
fn a_directory_that_cannot_be_looked_at_for_a_while_does_not_make_the_store_smaller() {
    for (high, low) in [(990, 980), (950, 900)] {
        let parent = on_disk();
        let (directory, away) = (parent.path().join("kv"), parent.path().join("away"));
        fs::create_dir(&directory).unwrap();
        let mut config = many_slots(&directory);
        (config.high_watermark_permille, config.low_watermark_permille) = (high, low);
        let mut driver = Driver::open(config);
        (0..60).for_each(|number| driver.write(number, 4 * KIB));
        fs::rename(&directory, &away).unwrap();
        // Whatever becomes of these, they find no room but that of others.
        (60..80).for_each(|number| drop(driver.try_write(number, 4 * KIB)));
        assert!(!driver.evicted.is_empty() && driver.tier.stats().used_bytes <= 4 * MIB);
        fs::rename(&away, &directory).unwrap();
        driver.settle();
        driver.evicted.clear();
        (100..400).for_each(|number| driver.write(number, 4 * KIB));
        assert_eq!(driver.evicted, [], "there is room");
        assert!(du(&directory) <= 4 * MIB);
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

/// Segments of 16 chunks of 60 KiB each, filled one after the other; chunks of a segment are neighbours.
fn segments_of_16(directory: &Path) -> (Driver, u32) {
    let record = 64 * KIB;
    let mut config = NvmeConfig::new("nvme", directory, 16 * MIB);
    config.segment_bytes = Some(16 * record + 4 * KIB);
    let mut driver = Driver::open(config);
    let count = 16 * 14;
    (0..count).for_each(|number| driver.write(number, 60 * KIB));
    assert!(driver.evicted.is_empty());
    (driver, count)
}

#[test]
fn a_starving_size_takes_the_coldest_segment_without_leases_and_nothing_else() {
    let directory = on_disk();
    let (mut driver, count) = segments_of_16(directory.path());
    // A record that needs more than what is left under the cap.
    let bytes = 3 * MIB;
    // One lease in each segment but the tenth and the twelfth, of a chunk in the middle.
    let mut leased = Leased((0..14).map(|segment| digest(segment * 16 + 7)).collect());
    let free = [9, 11];
    free.iter().for_each(|segment| assert!(leased.0.remove(&digest(segment * 16 + 7))));
    let id = driver.submit_write(1000, bytes);
    driver.settle_with(&leased);
    let (_, _, result) = driver.written.iter().find(|(written, ..)| *written == id).unwrap();
    assert_eq!(result.as_ref().map_err(ToString::to_string), Ok(&()));
    driver.check(1000, bytes);
    // A segment is a MiB: what was free, and these.
    let gone: Vec<u32> = (0..count).filter(|&number| !driver.holds(number)).collect();
    let of_free = |number: &u32| free.contains(&(number / 16));
    assert!(gone.iter().all(of_free) && !gone.is_empty(), "{gone:?}");
    assert_eq!(gone.len(), driver.evicted.len());

    // Now each has a lease, and the chunk of the other size, too.
    leased.0.extend(free.map(|segment| digest(segment * 16 + 7)));
    leased.0.insert(digest(1000));
    let evicted = driver.evicted.len();
    let ids = [driver.submit_write(2000, 5 * MIB - 4 * KIB), driver.submit_write(2001, 200 * KIB)];
    driver.settle_with(&leased);
    for (wanted, id) in [5 * MIB, 204 * KIB].into_iter().zip(ids) {
        let (_, _, result) = driver.written.iter().find(|(written, ..)| *written == id).unwrap();
        let Err(error) = result else { continue };
        let text = error.to_string();
        assert!(text.contains("leased") && text.contains(&wanted.to_string()), "{text}");
        assert_eq!(error.kind(), kv_tiers::ErrorKind::NoSpace);
    }
    let failed = driver.written.iter().filter(|(.., result)| result.is_err()).count();
    assert!(failed >= 1, "there was room for all of them");
    assert_eq!(driver.evicted.len(), evicted);
}

fn settle_removals(driver: &mut Driver) {
    for _ in 0..100 {
        driver.settle();
        if driver.tier.stats().removals_pending == 0 {
            return driver.settle();
        }
    }
    panic!("removals do not end: {:?}", driver.tier.stats());
}

/// What `purge` does to a model.
#[test]
fn the_space_of_removed_chunks_is_given_back_segment_by_segment() {
    for look_only in [false, true] {
        let directory = on_disk();
        let cap = 16 * MIB;
        let mut config = NvmeConfig::new("nvme", directory.path(), cap);
        config.segment_bytes = Some(MIB);
        let mut driver = Driver::open(config.clone());
        // Two models, of about the same bytes.
        (0..100).for_each(|number| driver.write(number, 60 * KIB));
        (1000..1025).for_each(|number| driver.write(number, 252 * KIB));
        if look_only {
            drop(driver);
            config.look_only = true;
            driver = Driver::open(config.clone());
        }
        let before = du(directory.path());
        // A read that has not ended keeps its segment.
        let reading = driver.submit_read(1000, 0..u32::MAX);
        driver.poll(&kv_tiers::Unguarded);
        for number in 1000..1025 {
            assert!(driver.tier.remove(digest(number), 0));
        }
        settle_removals(&mut driver);
        assert!(driver.read[&reading].1.is_ok());
        driver.read.clear();
        let after = du(directory.path());
        let (removed, segment) = (25 * 256 * KIB, MIB);
        assert!(before - after >= removed - segment, "{before} before, {after} after");
        assert!(driver.tier.stats().used_bytes <= before - removed + 2 * segment);
        // A segment that holds one chunk yet stays, for chunks of its size.
        let detail = driver.tier.detail();
        for number in 0..99 {
            assert!(driver.tier.remove(digest(number), 0));
        }
        settle_removals(&mut driver);
        assert_eq!(driver.tier.detail().segments, 1, "{detail:?}");
        driver.check(99, 60 * KIB);
        drop(driver);
        config.look_only = false;
        let mut driver = Driver::open(config);
        assert_eq!(driver.tier.stats().chunks, 1);
        driver.check(99, 60 * KIB);
        // The space serves again.
        (2000..2020).for_each(|number| driver.write(number, 252 * KIB));
        (2000..2020).for_each(|number| driver.check(number, 252 * KIB));
    }
}

#[test]
fn a_much_lower_cap_is_not_eaten_by_the_index_files_of_the_larger_store() {
    let directory = on_disk();
    let mut config = NvmeConfig::new("nvme", directory.path(), 64 * MIB);
    config.segment_bytes = Some(256 * KIB);
    let mut driver = Driver::open(config.clone());
    for number in 0..7000 {
        driver.submit_write(number, KIB);
        if number % 8 == 7 {
            driver.settle_quickly(&kv_tiers::Unguarded);
        }
    }
    driver.settle();
    assert!(driver.held(0..7000).len() > 6000);
    drop(driver);
    config.capacity_bytes = 3 * MIB / 2;
    let mut driver = Driver::open(config.clone());
    assert!(du(directory.path()) <= config.capacity_bytes, "{}", du(directory.path()));
    // It keeps what fits, and writes.
    let held = driver.held(0..7000);
    assert!(held.len() > 100, "{} chunks", held.len());
    held.into_iter().for_each(|number| driver.check(number, KIB));
    (10_000..10_300).for_each(|number| driver.write(number, KIB));
    assert!(driver.held(10_000..10_300).len() > 20 && driver.tier.stats().chunks > 100);
    assert!(du(directory.path()) <= config.capacity_bytes, "{}", du(directory.path()));
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
