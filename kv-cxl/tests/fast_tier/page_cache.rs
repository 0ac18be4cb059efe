//! What the page-cache provider and the DAX provider really do to pages.

use std::{env, fs, os::unix::fs::PermissionsExt, process::Command, thread};

use kv_cxl::{
    DeviceDax, DeviceDaxConfig, Extent, FastTier, FastTierError, Medium, PageCacheConfig,
    PageCacheFlash, Pinning, Protection, Residency, StageEvent, StageId,
};

use crate::contract::stage;

const MIB: u64 = 1 << 20;

fn config(directory: &tempfile::TempDir) -> PageCacheConfig {
    let mut config = PageCacheConfig::new(directory.path().join("flash"), 8 * MIB);
    config.bytes = Some(32 * MIB);
    config
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Bytes of the provider's mapping that the kernel says are locked.
fn locked_bytes(tier: &dyn FastTier) -> u64 {
    let start = tier.arena().base_address.unwrap();
    let end = start + usize::try_from(tier.arena().bytes).unwrap();
    let (mut inside, mut kib) = (false, 0);
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((from, _)) = first.split_once('-')
            && let Ok(from) = usize::from_str_radix(from, 16)
        {
            inside = (start..end).contains(&from);
        } else if let Some(locked) = line.strip_prefix("Locked:").filter(|_| inside) {
            kib += locked.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    kib << 10
}

/// Stages and returns how it ended.
fn end_of_staging(tier: &mut dyn FastTier, extent: Extent) -> StageEvent {
    tier.submit_stage(StageId(1), &[extent], 0).unwrap();
    let mut events = Vec::new();
    while tier.poll(0, &mut events).is_some() {
        thread::yield_now();
    }
    events.pop().unwrap()
}

#[test]
fn protection_locks_what_comes_in_and_nothing_is_left_locked() {
    let directory = directory();
    let mut flash = PageCacheFlash::open(config(&directory)).unwrap();
    if flash.caps().protection != Protection::Hard {
        println!("SKIP locking pages: there is no CAP_IPC_LOCK");
        return;
    }
    let (early, late) =
        (Extent { offset: 0, bytes: 4 * MIB }, Extent { offset: 8 * MIB, bytes: 4 * MIB });
    // In the cache, and not mapped.
    flash.medium().read(0, &mut vec![0; 4 << 20]).unwrap();
    assert_eq!(locked_bytes(&flash), 0);
    // What is there already is locked at once, what is not when it comes.
    flash.protect(&[early, late], 0).unwrap();
    assert_eq!(locked_bytes(&flash), 4 * MIB);
    stage(&mut flash, 2, &[late], 0);
    assert_eq!(locked_bytes(&flash), 8 * MIB);
    flash.unprotect(&[early], 0).unwrap();
    assert_eq!(locked_bytes(&flash), 4 * MIB);
    flash.unprotect(&[late], 0).unwrap();
    assert_eq!(locked_bytes(&flash), 0);
}

#[test]
fn advisory_protection_locks_nothing_and_still_keeps_its_budget() {
    let directory = directory();
    let mut config = config(&directory);
    config.pinning = Pinning::Advisory;
    let mut flash = PageCacheFlash::open(config).unwrap();
    assert_eq!(flash.caps().protection, Protection::Advisory);
    let extent = Extent { offset: 0, bytes: 8 * MIB };
    flash.protect(&[extent], 0).unwrap();
    stage(&mut flash, 1, &[extent], 0);
    assert_eq!(locked_bytes(&flash), 0);
    let over = flash.protect(&[Extent { offset: 8 * MIB, bytes: 2 * MIB }], 0);
    assert!(matches!(over, Err(FastTierError::NoCapacity { free_bytes: 0, .. })), "{over:?}");
}

#[test]
fn what_cannot_be_read_is_an_error_with_its_place_and_not_a_signal() {
    let directory = directory();
    let config = config(&directory);
    let mut flash = PageCacheFlash::open(config.clone()).unwrap();
    let path = config.path;
    let behind = Extent { offset: 16 * MIB, bytes: 2 * MIB };
    fs::File::options().write(true).open(&path).unwrap().set_len(8 * MIB).unwrap();
    let StageEvent::Failed(_, error) = end_of_staging(&mut flash, behind) else { panic!() };
    let text = error.to_string();
    let place = "populate of 2097152 bytes at offset 16777216";
    assert!(text.contains(place) && text.contains("flash") && text.contains("errno 14"), "{text}");
    assert!(flash.medium().read(behind.offset, &mut [0; 64]).is_err());
}

#[test]
fn device_memory_that_cannot_be_read_is_an_error_and_not_a_signal() {
    let directory = directory();
    let path = directory.path().join("dax");
    let file = fs::File::create(&path).unwrap();
    file.set_len(4 * MIB).unwrap();
    let mut device = DeviceDax::open(&DeviceDaxConfig::new(&path)).unwrap();
    let mut medium = device.medium();
    medium.write(MIB, b"bytes").unwrap();
    file.set_len(MIB).unwrap();
    let mut bytes = [0; 8192];
    for error in [
        medium.read(2 * MIB, &mut bytes).unwrap_err(),
        medium.read(MIB - 4096, &mut bytes).unwrap_err(),
        medium.write(2 * MIB, &bytes).unwrap_err(),
    ] {
        assert!(matches!(error, FastTierError::Io { errno: 14, .. }), "{error}");
    }
    let ended = end_of_staging(&mut device, Extent { offset: 0, bytes: 4 * MIB });
    assert!(
        matches!(ended, StageEvent::Failed(_, FastTierError::Io { errno: 14, .. })),
        "{ended:?}"
    );
    let behind = medium.read(4 * MIB - 1, &mut bytes).unwrap_err();
    assert!(matches!(behind, FastTierError::OutOfArena { .. }), "{behind}");
}

#[test]
fn bytes_written_to_either_medium_are_read_back_after_opening_again() {
    let directory = directory();
    let config = config(&directory);
    let text = b"keys and values";
    let round_trip = |mut medium: Box<dyn Medium>| {
        medium.write(12_345, text).unwrap();
        medium.flush(Extent { offset: 12_345, bytes: 15 }).unwrap();
    };
    round_trip(Box::new(PageCacheFlash::open(config.clone()).unwrap().medium()));
    let device = DeviceDaxConfig::new(&config.path);
    let mut read = [0; 15];
    DeviceDax::open(&device).unwrap().medium().read(12_345, &mut read).unwrap();
    assert_eq!(&read, text);
    let other = Extent { offset: 0, bytes: 4096 };
    let mut medium = DeviceDax::open(&device).unwrap().medium();
    medium.write(0, &[7; 4096]).unwrap();
    medium.flush(other).unwrap();
    drop(medium);
    let flash = PageCacheFlash::open(config).unwrap();
    let mut page = [0; 4096];
    flash.medium().read(0, &mut page).unwrap();
    assert_eq!(page, [7; 4096]);
}

#[test]
fn opening_brings_nothing_into_fast_memory() {
    let directory = directory();
    let flash = PageCacheFlash::open(config(&directory)).unwrap();
    let all = [Extent { offset: 0, bytes: 32 * MIB }];
    let residency = flash.residency(&all).unwrap();
    let in_memory = Residency::Bytes(32 * MIB);
    // All of it: the file system itself lives in memory.
    assert!([Residency::Bytes(0), in_memory].contains(&residency), "{residency:?}");
}

#[test]
fn a_file_of_somebody_else_is_served_and_its_residency_is_not_guessed() {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = directory.path().join("flash");
    fs::write(&path, vec![7; 2 << 20]).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let child = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "page_cache::as_somebody_else"])
        .env("KVBRAID_FILE_OF_ANOTHER", &path)
        .output();
    let Some(child) =
        child.ok().filter(|child| ![Some(126), Some(127)].contains(&child.status.code()))
    else {
        println!("SKIP a file of somebody else: this process cannot become another user");
        return;
    };
    let said = String::from_utf8_lossy(&child.stdout);
    let why = String::from_utf8_lossy(&child.stderr);
    if why.contains("setpriv") {
        println!("SKIP a file of somebody else: this process cannot become another user");
        return;
    }
    assert!(child.status.success() && said.contains("1 passed"), "{said}{why}");
}

/// The test above, in its child.
#[test]
fn as_somebody_else() {
    let Some(path) = env::var_os("KVBRAID_FILE_OF_ANOTHER") else { return };
    let mut flash = PageCacheFlash::open(PageCacheConfig::new(&path, 0)).unwrap();
    assert_eq!(flash.caps().protection, Protection::Advisory);
    let all = Extent { offset: 0, bytes: 2 * MIB };
    assert_eq!(end_of_staging(&mut flash, all), StageEvent::Done(StageId(1)));
    // The system says to such a process that everything is in memory, always: nobody repeats it.
    assert_eq!(flash.residency(&[all]), Ok(Residency::Unknown));
    let mut medium = flash.medium();
    let mut bytes = [0; 16];
    medium.read(MIB, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 16]);
    assert!(matches!(medium.write(0, &bytes), Err(FastTierError::Io { errno: 9, .. })));
}
