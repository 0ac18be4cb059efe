//! On a real Device-DAX device, if `KVBRAID_DAX` names one (`cargo xtask e2e dax` boots a machine that has one); else on a
//! regular file that stands in for it, as far as a file can.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![expect(clippy::print_stdout, reason = "what is skipped is said")]

#[path = "store/chunks.rs"]
mod chunks;
#[path = "fast_tier/contract.rs"]
mod contract;

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use chunks::{Content, Driver};
use kv_cxl::{
    DaxInfo, DaxTier, DaxTierConfig, DeviceDax, DeviceDaxConfig, Extent, FastTierError, Format,
    Medium,
};
use kv_tiers::{
    Arena, ArenaConfig, Tier, TierError,
    conformance::{Harness, Open, run, virtual_clock},
};

const MIB: u64 = 1 << 20;
/// The part of the device that the tests use.
const PART_BYTES: u64 = 64 * MIB;
const CHUNKS_MAX: u32 = 60;

/// The device, or what stands in for it.
struct Device {
    path: PathBuf,
    stand_in: Option<tempfile::TempDir>,
}

impl Device {
    fn find() -> Self {
        if let Some(path) = env::var_os("KVBRAID_DAX") {
            return Self { path: path.into(), stand_in: None };
        }
        let directory = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")))
            .unwrap();
        let path = directory.path().join("dax0.0");
        fs::File::create(&path).unwrap().set_len(PART_BYTES).unwrap();
        Self { path, stand_in: Some(directory) }
    }

    /// The device; `None`, said as a skip, if there is none.
    fn real(what: &str) -> Option<Self> {
        let device = Self::find();
        if device.stand_in.is_some() {
            println!("SKIP {what}: there is no Device-DAX device (KVBRAID_DAX)");
            return None;
        }
        Some(device)
    }

    fn part(&self, bytes: u64) -> DeviceDaxConfig {
        let mut config = DeviceDaxConfig::new(&self.path);
        config.bytes = Some(bytes);
        config
    }

    /// Why such a part cannot be opened.
    fn refusal(&self, offset_bytes: u64, bytes: Option<u64>) -> String {
        let mut config = DeviceDaxConfig::new(&self.path);
        (config.offset_bytes, config.bytes) = (offset_bytes, bytes);
        DeviceDax::open(&config).unwrap_err().to_string()
    }
}

#[test]
fn sizes_come_from_sysfs_where_the_file_says_zero() {
    let Some(device) = Device::real("sizes of a real device") else { return };
    assert_eq!(fs::metadata(&device.path).unwrap().len(), 0);
    let info = DaxInfo::of(&device.path).unwrap();
    assert!(info.is_device);
    assert!(info.bytes >= PART_BYTES && info.bytes.is_multiple_of(info.align_bytes), "{info:?}");
    assert_eq!(info.align_bytes, 2 * MIB);
    let whole = DeviceDax::open(&DeviceDaxConfig::new(&device.path)).unwrap();
    let medium = whole.medium();
    assert_eq!(medium.bytes(), info.bytes);
    // The last byte is there, the next one is refused and not a signal.
    medium.read(info.bytes - 1, &mut [0]).unwrap();
    let behind = medium.read(info.bytes, &mut [0]);
    assert!(matches!(behind, Err(FastTierError::OutOfArena { .. })), "{behind:?}");
}

#[test]
fn misaligned_parts_are_refused_with_what_to_use_instead() {
    let device = Device::find();
    let align = DaxInfo::of(&device.path).unwrap().align_bytes;
    let text = device.refusal(align + 512, Some(align));
    let use_instead = format!("use {align} or {}", 2 * align);
    assert!(text.contains("offset_bytes") && text.contains(&use_instead), "{text}");
    let text = device.refusal(0, Some(align - 512));
    let use_instead = format!("use 0 or {align}");
    assert!(text.contains("`bytes`") && text.contains(&use_instead), "{text}");
}

#[test]
fn parts_behind_the_end_are_refused_before_anybody_touches_them() {
    let device = Device::find();
    let DaxInfo { bytes, align_bytes, .. } = DaxInfo::of(&device.path).unwrap();
    let text = device.refusal(bytes - align_bytes, Some(2 * align_bytes));
    let room = format!("use at most {align_bytes} bytes");
    assert!(text.contains("behind the device") && text.contains(&room), "{text}");
    let text = device.refusal(bytes, Some(align_bytes));
    assert!(text.contains("use at most 0 bytes"), "{text}");
}

#[test]
fn a_device_in_use_is_refused() {
    let device = Device::find();
    let _used = DeviceDax::open(&device.part(4 * MIB)).unwrap();
    let text = device.refusal(0, Some(4 * MIB));
    assert!(text.contains("another process"), "{text}");
}

#[test]
fn the_provider_keeps_the_contract() {
    let device = Device::find();
    contract::check_all(|| Box::new(DeviceDax::open(&device.part(4 * MIB)).unwrap()));
}

#[test]
fn flushed_bytes_are_there_when_the_device_is_opened_again() {
    let device = Device::find();
    let bytes: Vec<u8> = (0..PART_BYTES / 16).map(|at| (at % 251).to_le_bytes()[0]).collect();
    let mut medium = DeviceDax::open(&device.part(PART_BYTES)).unwrap().medium();
    medium.write(777, &bytes).unwrap();
    medium.flush(Extent { offset: 777, bytes: bytes.len() as u64 }).unwrap();
    drop(medium);
    let medium = DeviceDax::open(&device.part(PART_BYTES)).unwrap().medium();
    let mut read = vec![0; bytes.len()];
    medium.read(777, &mut read).unwrap();
    assert!(read == bytes);
}

#[test]
fn the_tier_keeps_the_contract_of_a_tier() {
    let device = Device::find();
    let mut open = |open| -> Result<Box<dyn Tier>, TierError> {
        let mut config = DaxTierConfig::new("dax");
        config.payload_bytes_max = (2 << 20) + 5;
        config.queue_ops_max = 6;
        config.format = if open == Open::Fresh { Format::Always } else { Format::IfBlank };
        let medium = DeviceDax::open(&device.part(32 * MIB)).unwrap().medium();
        Ok(Box::new(DaxTier::open(config, Box::new(medium))?))
    };
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    let mut clock = virtual_clock();
    run(&mut Harness::new(&mut open, arena, &mut clock))
        .unwrap_or_else(|broken| panic!("{broken}"));
}

#[test]
fn a_device_that_is_system_ram_says_how_to_get_it_back() {
    let Some(path) = env::var_os("KVBRAID_DAX_SYSTEM_RAM") else {
        println!("SKIP a device in system-ram mode: KVBRAID_DAX_SYSTEM_RAM names none");
        return;
    };
    let text = DeviceDax::open(&DeviceDaxConfig::new(path)).unwrap_err().to_string();
    let command = "daxctl reconfigure-device --mode=devdax --force dax";
    assert!(text.contains("system-ram mode") && text.contains(command), "{text}");
}

fn open_store(path: &Path, format: Format) -> Driver {
    let mut part = DeviceDaxConfig::new(path);
    part.bytes = Some(PART_BYTES);
    // The first part of a real device is an engine's, later.
    part.offset_bytes = if DaxInfo::of(path).unwrap().is_device { PART_BYTES } else { 0 };
    let mut config = DaxTierConfig::new("dax");
    config.format = format;
    let medium = DeviceDax::open(&part).unwrap().medium();
    Driver::new(Box::new(DaxTier::open(config, Box::new(medium)).unwrap()), 2 << 20)
}

fn content(number: u32) -> Content {
    Content { number, version: 1, bytes: number * 7919 % 1_000_003 }
}

/// Some chunks are removed again, three later.
fn is_removed(number: u32) -> bool {
    number % 5 == 2
}

/// Stores until it is killed, and says after each chunk that it is stored. A part of the test below, run by itself.
#[test]
fn store_until_killed() {
    let Some(path) = env::var_os("KVBRAID_DAX_STORE") else { return };
    let mut driver = open_store(Path::new(&path), Format::Always);
    for number in 0..CHUNKS_MAX {
        driver.write(content(number)).0.unwrap();
        if let Some(old) = number.checked_sub(3).filter(|old| is_removed(*old)) {
            assert!(driver.tier.remove(chunks::digest(old), 0));
        }
        // Not by a macro: the test's output is kept back till its end, and this one has none.
        writeln!(io::stdout(), "STORED {number}").unwrap();
    }
    thread::sleep(Duration::from_secs(60));
}

/// What was said to be stored is there, what was said to be removed is not, and all else is whole or absent.
fn check_recovered(path: &Path, last_stored: u32) {
    let mut driver = open_store(path, Format::IfBlank);
    let mut found = 0;
    for number in 0..CHUNKS_MAX {
        let chunk = driver.read(number).unwrap_or_else(|error| panic!("{error}"));
        assert!(chunk.is_none() || chunk == Some(content(number)), "{chunk:?}");
        let was_stored = number <= last_stored;
        if was_stored && !is_removed(number) {
            assert!(chunk.is_some(), "chunk {number} was stored, and is gone");
        }
        if was_stored && is_removed(number) && number + 3 <= last_stored {
            assert!(chunk.is_none(), "chunk {number} was removed, and is back");
        }
        found += u32::from(chunk.is_some());
    }
    assert!(found > 0);
    // It goes on.
    let another = Content { number: 1000, version: 1, bytes: 100_000 };
    driver.write(another).0.unwrap();
    assert_eq!(driver.read(1000), Ok(Some(another)));
}

#[test]
fn what_was_stored_before_a_kill_is_recovered_after_it() {
    if let (Some(path), Ok(last)) = (env::var_os("KVBRAID_DAX"), env::var("KVBRAID_DAX_STORED")) {
        // The whole machine was killed, and has booted again.
        check_recovered(Path::new(&path), last.parse().unwrap());
        return;
    }
    let device = Device::find();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "store_until_killed"])
        .env("KVBRAID_DAX_STORE", &device.path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut stored = lines.map_while(Result::ok).filter_map(|line| {
        let (_, number) = line.rsplit_once("STORED ")?;
        number.parse::<u32>().ok()
    });
    let last = stored.find(|number| *number >= 20);
    child.kill().unwrap();
    child.wait().unwrap();
    check_recovered(&device.path, last.unwrap());
}
