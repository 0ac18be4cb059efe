//! Every way of I/O that the NVMe tier falls back to is really used, said, and brings the right bytes.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]
#![expect(clippy::print_stdout, reason = "what this machine cannot do is shown")]

mod nvme_support;

use std::{
    env, fs,
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::Path,
    process::{Command, Stdio},
};

use kv_tiers::{ErrorKind, IoMode, NvmeConfig, Tier};
use nvme_support::{Driver, KIB, MIB, on_disk, on_tmpfs, segments};
use tempfile::TempDir;

/// Set in a child process: the directory it shall use.
const CHILD: &str = "KV_TIERS_NVME_CHILD";

const NOBODY: u32 = 65_534;

fn without(change: impl Fn(&mut IoMode)) -> IoMode {
    let mut mode = IoMode::ALL;
    change(&mut mode);
    mode
}

/// Each way of I/O that there is.
fn modes() -> Vec<IoMode> {
    let no_ring = without(|mode| {
        (mode.ring, mode.registered_buffers, mode.registered_files) = (false, false, false);
    });
    vec![
        IoMode::ALL,
        without(|mode| mode.registered_buffers = false),
        without(|mode| mode.registered_files = false),
        without(|mode| mode.direct = false),
        no_ring,
        IoMode::default(),
    ]
}

fn config(directory: &Path, allow: IoMode) -> NvmeConfig {
    let mut config = NvmeConfig::new("nvme", directory, 128 * MIB);
    config.segment_bytes = Some(9 * MIB);
    config.allow = allow;
    config
}

/// Sizes around every boundary.
const SIZES: [u64; 5] = [0, 1, 4096, MIB + 1, 4 * MIB];

fn fill(driver: &mut Driver) {
    (0..).zip(SIZES).for_each(|(number, bytes)| driver.write(number, bytes));
    verify(driver);
}

fn verify(driver: &mut Driver) {
    for (number, bytes) in (0..).zip(SIZES) {
        driver.check(number, bytes);
        assert_eq!(
            driver.try_read(number, 1..3).unwrap().len() as u64,
            match bytes {
                0..=MIB => 0,
                _ => (bytes - MIB).min(2 * MIB),
            }
        );
    }
}

#[test]
fn what_is_not_allowed_is_not_used_and_every_way_reads_what_another_wrote() {
    for make in [on_disk, on_tmpfs] {
        let directory = make();
        for (round, allow) in modes().into_iter().enumerate() {
            let mut driver = Driver::open(config(directory.path(), allow));
            assert_eq!(driver.tier.stats().io_mode, allow);
            assert_eq!(driver.tier.stats().fallbacks, <[String; 0]>::default());
            if round == 0 {
                fill(&mut driver);
            }
            verify(&mut driver);
            driver.write(100 + u32::try_from(round).unwrap(), 2 * MIB);
        }
        for (round, allow) in (0..).zip(modes()) {
            let mut driver = Driver::open(config(directory.path(), allow));
            driver.check(100 + 5 - round, 2 * MIB);
        }
    }
}

#[test]
fn requests_of_any_size_and_a_tiny_ring_bring_the_same_bytes() {
    for allow in [IoMode::ALL, IoMode::default()] {
        for (request_bytes, entries) in [(4096, 1), (4096, 3), (64 * KIB, 2), (MIB, 256)] {
            let directory = on_disk();
            let mut config = config(directory.path(), allow);
            config.request_bytes_max = Some(request_bytes);
            config.ring_entries = entries;
            config.write_requests_max = entries;
            let mut driver = Driver::open(config);
            let writes: Vec<_> = (0..5).map(|number| driver.submit_write(number, MIB)).collect();
            driver.settle();
            assert_eq!(driver.written.len(), writes.len());
            let before = driver.tier.stats().device_requests;
            let reads: Vec<_> = (0..5).map(|number| driver.submit_read(number, 0..9)).collect();
            driver.settle();
            let requests = driver.tier.stats().device_requests - before;
            assert_eq!(requests, 5 * (MIB + 4096).div_ceil(request_bytes));
            assert!(reads.iter().all(|id| driver.read[id].1.is_ok()));
            driver.read.clear();
            (0..5).for_each(|number| driver.check(number, MIB));
        }
    }
}

#[test]
fn held_writes_stop_between_requests_and_reads_go_on() {
    for allow in [IoMode::ALL, IoMode::default()] {
        let directory = on_disk();
        let mut config = config(directory.path(), allow);
        config.request_bytes_max = Some(16 * KIB);
        config.write_requests_max = 1;
        let mut driver = Driver::open(config);
        driver.write(0, MIB);
        let write_requests = (4 * MIB).div_ceil(16 * KIB) + 1;
        let read_requests = (MIB + 4 * KIB).div_ceil(16 * KIB);
        // A fast device can do the whole write within one poll: then the hold comes too late.
        let held_within_a_write = (1..20).any(|number| {
            let before = driver.tier.stats().device_requests;
            driver.submit_write(number, 4 * MIB);
            driver.poll(&kv_tiers::Unguarded);
            driver.tier.hold_writes(true);
            driver.check(0, MIB);
            let held_at = driver.tier.stats().device_requests;
            driver.check(0, MIB);
            let requests = driver.tier.stats().device_requests;
            assert_eq!(requests, held_at + read_requests, "only the read went on");
            let cut = held_at - before < read_requests + write_requests;
            assert_eq!(driver.holds(number), !cut);
            driver.tier.hold_writes(false);
            driver.settle();
            driver.check(number, 4 * MIB);
            cut
        });
        assert!(held_within_a_write);
    }
}

fn cached_pages(path: &Path) -> Option<u64> {
    let output = Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(path).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

#[test]
fn direct_io_leaves_nothing_in_the_page_cache_and_buffered_reads_little() {
    let cached = |directory: &TempDir| -> Option<u64> {
        segments(directory.path()).iter().map(|path| cached_pages(path)).sum()
    };
    let directory = on_disk();
    let mut driver = Driver::open(config(directory.path(), IoMode::ALL));
    fill(&mut driver);
    let Some(pages) = cached(&directory) else {
        println!("SKIP page cache: no fincore");
        return;
    };
    assert_eq!(pages, 0);
    drop(driver);

    let directory = on_disk();
    let mut driver = Driver::open(config(directory.path(), IoMode::default()));
    fill(&mut driver);
    driver.write(50, 4 * MIB);
    assert!(cached(&directory).unwrap() >= 4 * MIB / 4096, "this test sees nothing");
    // Written pages are clean after this.
    for path in segments(directory.path()) {
        std::fs::File::open(path).unwrap().sync_all().unwrap();
    }
    verify(&mut driver);
    driver.check(50, 4 * MIB);
    let pages = cached(&directory).unwrap();
    assert!(pages <= 64, "{pages} pages stay after they were read");
}

/// Runs the named test of this file in a child process that `prepare` restricts. False: it could not be started.
fn run_child(test: &str, directory: &Path, prepare: impl Fn(&Path) -> Command) -> bool {
    let mut command = prepare(&env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, directory).stdin(Stdio::null());
    match command.output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            true
        }
        Err(error) => {
            println!("SKIP {test}: {error}");
            false
        }
    }
}

/// In a child: what the tier chose there, after checking its bytes.
fn chosen_in_child() -> Option<(IoMode, Vec<String>)> {
    let directory = env::var_os(CHILD)?;
    let mut driver = Driver::open(config(Path::new(&directory), IoMode::ALL));
    fill(&mut driver);
    let stats = driver.tier.stats();
    Some((stats.io_mode, stats.fallbacks))
}

#[test]
fn little_lockable_memory_means_unregistered_buffers() {
    if let Some((mode, fallbacks)) = chosen_in_child() {
        assert_eq!(mode, without(|mode| mode.registered_buffers = false), "{fallbacks:?}");
        assert!(
            fallbacks.len() == 1 && fallbacks[0].starts_with("registered buffers not used: "),
            "{fallbacks:?}"
        );
        return;
    }
    // A directory and a user that may not lock more: root is not limited.
    let directory = tempfile::tempdir().unwrap();
    let root = fs::metadata("/proc/self").unwrap().uid() == 0;
    if root {
        chown(directory.path(), Some(NOBODY), None).unwrap();
    }
    run_child("little_lockable_memory_means_unregistered_buffers", directory.path(), |program| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -l 64 && exec \"$0\" \"$@\""]).arg(program);
        if root {
            command.uid(NOBODY);
        }
        command
    });
}

/// Denies io_uring_setup with EPERM, as container runtimes do, then becomes the program.
const DENY_RING: &str = r"
import ctypes, os, struct, sys
filter = struct.pack('HBBI', 0x20, 0, 0, 0) + struct.pack('HBBI', 0x15, 0, 1, 425) \
    + struct.pack('HBBI', 0x06, 0, 0, 0x00050001) + struct.pack('HBBI', 0x06, 0, 0, 0x7fff0000)
buffer = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 4, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
";

/// Denies a system call with an errno, then becomes the program.
fn denying(call: u32, errno: u32) -> String {
    DENY_RING
        .replace("0, 1, 425", &format!("0, 1, {call}"))
        .replace("0x00050001", &format!("{:#x}", 0x0005_0000 + errno))
}

#[test]
fn without_fallocate_files_are_sparse_and_the_cap_holds() {
    if let Some(directory) = env::var_os(CHILD) {
        let place = Path::new(&directory);
        let mut config = config(place, IoMode::ALL);
        config.capacity_bytes = 16 * MIB;
        config.segment_bytes = Some(4 * MIB);
        let mut driver = Driver::open(config.clone());
        for number in 0..40 {
            driver.write(number, MIB);
            assert!(nvme_support::du(place) <= 16 * MIB);
        }
        let told = driver.tier.stats().fallbacks;
        assert!(told.len() == 1 && told[0].starts_with("reserved space not used: "), "{told:?}");
        drop(driver);
        let mut driver = Driver::open(config);
        let held = driver.held(0..40);
        assert!(held.len() >= 12, "{held:?}");
        held.into_iter().for_each(|number| driver.check(number, MIB));
        return;
    }
    let directory = on_disk();
    let test = "without_fallocate_files_are_sparse_and_the_cap_holds";
    run_child(test, directory.path(), |program| {
        let mut command = Command::new("python3");
        // fallocate: not supported, as NFS before 4.2 and some FUSE file systems say.
        let denied = denying(285, 95);
        command.args(["-c", &denied]).arg(program);
        command
    });
}

#[test]
fn io_uring_denied_means_threads() {
    if let Some((mode, fallbacks)) = chosen_in_child() {
        let mut expected = IoMode::default();
        expected.direct = true;
        assert_eq!(mode, expected, "{fallbacks:?}");
        assert!(
            fallbacks.len() == 1 && fallbacks[0].starts_with("io_uring not used: "),
            "{fallbacks:?}"
        );
        return;
    }
    let directory = on_disk();
    run_child("io_uring_denied_means_threads", directory.path(), |program| {
        let mut command = Command::new("python3");
        command.args(["-c", DENY_RING]).arg(program);
        command
    });
}

/// Denies io_uring_setup with ENOMEM for more than so many entries, as kernels that count a ring against the memlock limit
/// do, then becomes the program.
fn denying_rings_above(entries: u32) -> String {
    let (before, rest) = DENY_RING.split_once("filter = ").unwrap();
    let (_, after) = rest.split_once("\nbuffer").unwrap();
    let filter = [
        (0x20, 0, 0, 0),
        (0x15, 0, 3, 425),
        (0x20, 0, 0, 16),
        (0x25, 0, 1, entries),
        (0x06, 0, 0, 0x0005_000c),
        (0x06, 0, 0, 0x7fff_0000),
    ];
    let filter = filter.map(|line| format!("struct.pack('HBBI', *{line:?})")).join(" + ");
    let program = format!("{before}filter = {filter}\nbuffer{after}");
    program.replace("'HxxxxxxQ', 4", "'HxxxxxxQ', 6")
}

#[test]
fn a_ring_for_which_memory_is_short_has_fewer_entries() {
    if let Some((mode, fallbacks)) = chosen_in_child() {
        assert_eq!(mode, IoMode::ALL, "{fallbacks:?}");
        let intro = "256 ring entries not used but 16: io_uring_setup: ";
        assert!(fallbacks.len() == 1 && fallbacks[0].starts_with(intro), "{fallbacks:?}");
        return;
    }
    let directory = on_disk();
    run_child("a_ring_for_which_memory_is_short_has_fewer_entries", directory.path(), |program| {
        let mut command = Command::new("python3");
        command.args(["-c", &denying_rings_above(31)]).arg(program);
        command
    });
}

#[test]
fn no_memory_for_any_ring_means_threads() {
    if let Some((mode, fallbacks)) = chosen_in_child() {
        assert!(!mode.ring && mode.direct, "{fallbacks:?}");
        let intro = "io_uring not used: io_uring_setup: ";
        assert!(fallbacks.len() == 1 && fallbacks[0].starts_with(intro), "{fallbacks:?}");
        return;
    }
    let directory = on_disk();
    run_child("no_memory_for_any_ring_means_threads", directory.path(), |program| {
        let mut command = Command::new("python3");
        command.args(["-c", &denying_rings_above(0)]).arg(program);
        command
    });
}

#[test]
fn a_full_file_system_recycles_what_is_ours() {
    if let Some(directory) = env::var_os(CHILD) {
        // 8 MiB of file system below a cap of 128 MiB.
        let mut config = config(Path::new(&directory), IoMode::ALL);
        config.segment_bytes = Some(2 * MIB + 64 * KIB);
        let mut driver = Driver::open(config);
        for number in 0..20 {
            driver.write(number, MIB);
            driver.check(number, MIB);
        }
        let held = driver.held(0..20);
        assert!((3..8).contains(&held.len()), "{held:?}");
        held.into_iter().for_each(|number| driver.check(number, MIB));
        driver.write(50, MIB / 2);
        driver.check(50, MIB / 2);
        let error = driver.try_write(60, 4 * MIB).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert!(!driver.holds(60) && driver.tier.stats().chunks > 0);
        return;
    }
    let directory = on_disk();
    run_child("a_full_file_system_recycles_what_is_ours", directory.path(), |program| {
        let mount = "mount -t tmpfs -o size=8m none \"$KV_TIERS_NVME_CHILD\" && exec \"$0\" \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["-rm", "sh", "-c", mount]).arg(program);
        command
    });
}
