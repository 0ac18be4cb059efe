//! The page cache as a fast memory that is smaller than what is asked of it: a memory cgroup around a child process.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
    thread,
};

use kv_cxl::{
    Extent, FastTier, PageCacheConfig, PageCacheFlash, Protection, Residency, StageEvent, StageId,
};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 192 * MIB;
const FAST_BYTES: u64 = 64 * MIB;
const PIN_BYTES: u64 = 24 * MIB;

/// A memory cgroup of [`FAST_BYTES`], gone when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `Err` says why there can be none.
    fn new() -> Result<Self, String> {
        let name = format!("kvbraid-test-{}", process::id());
        let root = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(root.join("cgroup.subtree_control"));
        let (path, limit) = if root.join("memory/memory.limit_in_bytes").exists() {
            (root.join("memory").join(name), "memory.limit_in_bytes")
        } else if controllers.is_ok_and(|list| list.contains("memory")) {
            (root.join(name), "memory.max")
        } else {
            return Err("there is no memory cgroup".into());
        };
        fs::create_dir(&path).map_err(|error| format!("no cgroup can be made: {error}"))?;
        let cgroup = Self(path);
        fs::write(cgroup.0.join(limit), FAST_BYTES.to_string())
            .map_err(|error| format!("the cgroup takes no limit: {error}"))?;
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn open(path: &Path) -> PageCacheFlash {
    let mut config = PageCacheConfig::new(path, PIN_BYTES);
    config.bytes = Some(FILE_BYTES);
    PageCacheFlash::open(config).unwrap()
}

fn stage(flash: &mut PageCacheFlash, extent: Extent) {
    flash.submit_stage(StageId(1), &[extent], 0).unwrap();
    let mut events = Vec::new();
    while flash.poll(0, &mut events).is_some() {
        thread::yield_now();
    }
    assert_eq!(events, [StageEvent::Done(StageId(1))]);
}

fn resident(flash: &PageCacheFlash, extent: Extent) -> u64 {
    match flash.residency(&[extent]).unwrap() {
        Residency::Bytes(bytes) => bytes,
        Residency::Unknown => panic!("a file of one's own is known exactly"),
    }
}

#[test]
fn what_did_not_stay_is_not_resident_and_what_is_protected_stays() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("flash");
    let flash = open(&path);
    let is_cold = resident(&flash, Extent { offset: 0, bytes: FILE_BYTES }) < FILE_BYTES;
    let is_hard = flash.caps().protection == Protection::Hard;
    drop(flash);
    let cgroup = match Cgroup::new() {
        Ok(cgroup) if is_cold && is_hard => cgroup,
        Ok(_) if is_hard => return println!("SKIP a small fast memory: files live in memory here"),
        Ok(_) => return println!("SKIP a small fast memory: there is no CAP_IPC_LOCK"),
        Err(why) => return println!("SKIP a small fast memory: {why}"),
    };
    // Joins the cgroup before it runs: memory is charged to who first uses it.
    let child = Command::new("sh")
        .args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""])
        .arg(&cgroup.0)
        .arg(env::current_exe().unwrap())
        .args(["--exact", "in_the_cgroup"])
        .env("KVBRAID_SMALL_MEMORY", &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{}: {said}", child.status);
}

/// The test above, in its child.
#[test]
fn in_the_cgroup() {
    let Some(path) = env::var_os("KVBRAID_SMALL_MEMORY") else { return };
    let mut flash = open(Path::new(&path));
    let all = Extent { offset: 0, bytes: FILE_BYTES };
    // The system says that all came in, three times what fits.
    stage(&mut flash, all);
    let stayed = resident(&flash, all);
    assert!(stayed > 0 && stayed <= FAST_BYTES, "{stayed}");
    // Protected before it is staged, it stays whatever streams past.
    let kept = Extent { offset: 100 * MIB, bytes: PIN_BYTES };
    flash.protect(&[kept], 0).unwrap();
    stage(&mut flash, kept);
    assert_eq!(resident(&flash, kept), PIN_BYTES);
    for _ in 0..2 {
        stage(&mut flash, Extent { offset: 0, bytes: 100 * MIB });
        stage(&mut flash, Extent { offset: 124 * MIB, bytes: FILE_BYTES - 124 * MIB });
    }
    assert_eq!(resident(&flash, kept), PIN_BYTES);
    // Ending protection evicts nothing by itself; then it goes as everything else.
    flash.unprotect(&[kept], 0).unwrap();
    assert_eq!(resident(&flash, kept), PIN_BYTES);
    flash.evict_hint(&[kept], 0).unwrap();
    assert_eq!(resident(&flash, kept), 0);
}
