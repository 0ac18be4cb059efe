//! The directory of a tier: its file system, who may use it, and whether there is room.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, FallocateFlags, OFlag, RenameFlags, fallocate, renameat2},
    sys::{
        statvfs::{FsFlags, statvfs},
        uio::pread,
    },
    unistd::geteuid,
};

use super::Diagnosis;
use crate::{ByteSize, TierConfig, TierKind};

/// Names of file systems by the number that statfs gives, and what is to be known of them.
const FILE_SYSTEMS: [(u32, &str, Kind); 17] = [
    (0x0000_ef53, "ext4", Kind::Local),
    (0x5846_5342, "xfs", Kind::Local),
    (0xf2f5_2010, "f2fs", Kind::Local),
    (0x9123_683e, "btrfs", Kind::Copying),
    (0x2fc1_2fc1, "zfs", Kind::Copying),
    (0xca45_1a4e, "bcachefs", Kind::Copying),
    (0x0102_1994, "tmpfs", Kind::Memory),
    (0x8584_58f6, "ramfs", Kind::Memory),
    (0x794c_7630, "overlayfs", Kind::Layered),
    (0x6573_5546, "FUSE", Kind::Fuse),
    (0x0000_6969, "NFS", Kind::Network),
    (0xfe53_4d42, "SMB", Kind::Network),
    (0x00c3_6400, "Ceph", Kind::Network),
    (0x0bd0_0bd0, "Lustre", Kind::Network),
    (0x4750_4653, "GPFS", Kind::Network),
    (0x1983_0326, "BeeGFS", Kind::Network),
    (0x0102_1997, "9p", Kind::Network),
];
const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Local,
    /// Never writes in place, and checks or packs by itself.
    Copying,
    Memory,
    Layered,
    Fuse,
    Network,
    Unknown,
}

/// Whether an engine could be tried there.
pub(super) fn examine(diagnosis: &mut Diagnosis, tier: &TierConfig) -> bool {
    let what = format!("tier {}", tier.name);
    let Some(path) = &tier.path else { return false };
    let metadata = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => metadata,
        Ok(_) => {
            let found = format!("{} is no directory", path.display());
            diagnosis.fail(what, found, ("the tier does not open", "name a directory"));
            return false;
        }
        Err(error) => {
            let found = format!("{}: {error}", path.display());
            let why = "an engine would make it, on whatever file system is above: the disk may not be mounted";
            let fix = format!("mount it, then mkdir -p -m 700 {}", path.display());
            diagnosis.fail(what, found, (why, &fix));
            return false;
        }
    };
    file_system(diagnosis, tier, &what, path);
    permissions(diagnosis, tier, &what, path, &metadata);
    space(diagnosis, tier, &what, path);
    let trial = match Trial::new(path) {
        Ok(trial) => trial,
        Err(error) => {
            let found = format!("no file can be made in {}: {error}", path.display());
            let fix = "chown it to the user of the serving engine, or mount it for writing";
            diagnosis.fail(what, found, ("the tier does not open", fix));
            return false;
        }
    };
    if tier.kind == TierKind::Shared {
        trial.publish(diagnosis, &what);
    } else {
        trial.direct(diagnosis, &what);
    }
    true
}

fn file_system(diagnosis: &mut Diagnosis, tier: &TierConfig, what: &str, path: &Path) {
    let Some((name, kind)) = kind_of(path) else {
        diagnosis.warn(what, "its file system cannot be told", ("", ""));
        return;
    };
    let found = format!("{} on {name}", path.display());
    let shared = tier.kind == TierKind::Shared;
    let advice = match kind {
        Kind::Local | Kind::Copying | Kind::Layered | Kind::Memory if shared => (
            "this looks like one node's own: no other node sees what is written here",
            "mount the file system that the nodes share; for the ranks of one node it is right",
        ),
        Kind::Network | Kind::Fuse if !shared => (
            "kind nvme preallocates large files and locks the directory for one node",
            "write kind = \"shared\"",
        ),
        Kind::Memory => (
            "this is memory: it counts against the machine's or the container's, and ends with a reboot",
            "name a directory on a disk, or write kind = \"memory\"",
        ),
        Kind::Layered => (
            "this is the layer of a container: slow, and gone with it",
            "mount a volume or a directory of the host",
        ),
        Kind::Copying => (
            "it copies on write and checks by itself: slower, and a cap near its size cannot be kept",
            "ext4 or xfs; on btrfs at least chattr +C on the empty directory",
        ),
        Kind::Fuse => (
            "FUSE may answer before bytes are kept, and may hang",
            "the file system's kernel client, where there is one",
        ),
        Kind::Unknown => {
            ("it was not tried with this file system", "see whether its lines below are ok")
        }
        Kind::Local | Kind::Network => {
            diagnosis.ok(what, found);
            return;
        }
    };
    diagnosis.warn(what, found, advice);
}

fn kind_of(path: &Path) -> Option<(String, Kind)> {
    let number = nix::sys::statfs::statfs(path).ok()?.filesystem_type().0;
    // The kernel's numbers have 32 bits, whatever type a libc gives them.
    let number = u32::try_from(i128::from(number) & 0xffff_ffff).ok()?;
    let known = FILE_SYSTEMS.iter().find(|(known, _, _)| *known == number);
    Some(known.map_or_else(
        || (format!("an unknown file system ({number:#x})"), Kind::Unknown),
        |(_, name, kind)| ((*name).to_owned(), *kind),
    ))
}

fn permissions(
    diagnosis: &mut Diagnosis,
    tier: &TierConfig,
    what: &str,
    path: &Path,
    metadata: &fs::Metadata,
) {
    let mode = metadata.permissions().mode() & 0o7777;
    let user = geteuid().as_raw();
    let found = format!("mode {mode:04o}, owner {}, this user {user}", metadata.uid());
    if mode & 0o077 != 0 && tier.kind != TierKind::Shared {
        let why = "who can read the files can tell the prompts that they were computed from";
        let fix = format!("chmod 700 {}", path.display());
        diagnosis.warn(what, found, (why, &fix));
    } else if metadata.uid() != user && user == 0 {
        let fix = "run doctor as the user of the serving engine";
        diagnosis.warn(what, found, ("root may what that user may not", fix));
    } else {
        diagnosis.ok(what, found);
    }
}

fn space(diagnosis: &mut Diagnosis, tier: &TierConfig, what: &str, path: &Path) {
    let Ok(stats) = statvfs(path) else {
        diagnosis.warn(what, "its free space cannot be told", ("", ""));
        return;
    };
    if stats.flags().contains(FsFlags::ST_RDONLY) {
        let why = "nothing can be stored";
        diagnosis.fail(what, "it is mounted for reading only", (why, "mount it for writing"));
        return;
    }
    let free = stats.blocks_available().saturating_mul(stats.fragment_size());
    let cap = tier.capacity.unwrap_or_default().0;
    let floor = tier.min_free_bytes.unwrap_or_default().0;
    let used = bytes_below(path);
    let reach = free.saturating_add(used).saturating_sub(floor);
    let found = format!(
        "{} free, {} used here, cap {}{}",
        ByteSize(whole_mib(free)),
        ByteSize(whole_mib(used)),
        ByteSize(cap),
        if floor > 0 { format!(", {} stay free", ByteSize(floor)) } else { String::new() },
    );
    if cap > reach {
        let why = "the disk is full before the cap is reached: writes fail and are given up for a while each time";
        let fix = format!("write capacity = \"{}\" or less", ByteSize(whole_mib(reach / 20 * 19)));
        diagnosis.warn(what, found, (why, &fix));
    } else {
        diagnosis.ok(what, found);
    }
}

fn whole_mib(bytes: u64) -> u64 {
    bytes >> 20 << 20
}

/// What stands in a directory, as far as it can be read; not more than that many files, which is said of large ones
/// by the tier itself.
fn bytes_below(path: &Path) -> u64 {
    const FILES_MAX: usize = 100_000;
    let (mut bytes, mut left) = (0, vec![path.to_owned()]);
    let mut files = 0;
    while let Some(path) = left.pop() {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            files += 1;
            if metadata.is_dir() {
                left.push(entry.path());
            } else {
                bytes += metadata.blocks() * 512;
            }
        }
        if files > FILES_MAX {
            break;
        }
    }
    bytes
}

/// A file in the tier's directory, removed at the end.
struct Trial {
    path: PathBuf,
    file: File,
}

impl Trial {
    fn new(directory: &Path) -> io::Result<Self> {
        let path = directory.join(format!(".kvbraid-doctor-{:016x}", fastrand::u64(..)));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self { path, file })
    }

    /// Space ahead of writes, and I/O past the page cache.
    fn direct(&self, diagnosis: &mut Diagnosis, what: &str) {
        let length = 64 * PAGE_BYTES as i64;
        let allocated = fallocate(&self.file, FallocateFlags::empty(), 0, length);
        if let Err(errno) = allocated {
            let why = "files grow while chunks are written: slower, in more pieces, and full without warning";
            diagnosis.warn(what, format!("fallocate: {}", errno.desc()), (why, "ext4 or xfs"));
            // So that there is something to read.
            let _ = self.file.set_len(64 * PAGE_BYTES as u64);
        }
        let flag = OFlag::O_DIRECT.bits();
        let opened = OpenOptions::new().read(true).custom_flags(flag).open(&self.path);
        let file = match opened {
            Ok(file) => file,
            Err(error) => {
                let why = "reads go through the page cache: copied once more, and they push out what others need";
                diagnosis.warn(
                    what,
                    format!("O_DIRECT: {error}"),
                    (why, "ext4 or xfs on a block device"),
                );
                return;
            }
        };
        let aligned =
            [512, PAGE_BYTES].into_iter().find(|&bytes| reads_direct(&file, bytes).is_ok());
        match aligned {
            Some(bytes) => diagnosis.ok(
                what,
                format!(
                    "O_DIRECT in units of {bytes} bytes{}",
                    if allocated.is_ok() { ", fallocate" } else { "" }
                ),
            ),
            None => {
                let errno = reads_direct(&file, PAGE_BYTES).err().map_or("", Errno::desc);
                let why = "reads go through the page cache: copied once more, and they push out what others need";
                diagnosis.warn(
                    what,
                    format!("O_DIRECT in units of 4096 bytes: {errno}"),
                    (why, "ext4 or xfs on a block device"),
                );
            }
        }
    }

    /// The calls that let the first of many writers win.
    fn publish(&self, diagnosis: &mut Diagnosis, what: &str) {
        let other = self.path.with_extension("other");
        let linked = fs::hard_link(&self.path, &other);
        let again = fs::hard_link(&self.path, &other);
        let _ = fs::remove_file(&other);
        let moved =
            renameat2(AT_FDCWD, &self.path, AT_FDCWD, &other, RenameFlags::RENAME_NOREPLACE);
        let back = fs::rename(&other, &self.path);
        let refuses = again.is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists);
        match (linked, moved) {
            (Ok(()), _) if refuses => {
                diagnosis.ok(what, "chunks are published by link, the first writer wins");
            }
            (_, Ok(())) if back.is_ok() => {
                diagnosis.ok(what, "chunks are published by renameat2, the first writer wins");
            }
            (linked, moved) => {
                let link =
                    linked.err().map_or_else(|| "replaces".to_owned(), |error| error.to_string());
                let rename = moved.err().map_or("", |errno| errno.desc());
                let found = format!("link: {link}; renameat2: {rename}");
                let why = "nodes could replace each other's chunks, so the tier does not open";
                diagnosis.fail(what, found, (why, "a file system with hard links"));
            }
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Reads so many bytes at an offset of as many, into memory that is aligned likewise.
fn reads_direct(file: &File, bytes: usize) -> Result<(), Errno> {
    let mut memory = vec![0_u8; 3 * PAGE_BYTES];
    let start = memory.as_ptr().align_offset(PAGE_BYTES) + bytes % PAGE_BYTES;
    let place = memory.get_mut(start..start + bytes).ok_or(Errno::EINVAL)?;
    pread(file, place, i64::try_from(bytes).unwrap_or(0)).map(drop)
}
