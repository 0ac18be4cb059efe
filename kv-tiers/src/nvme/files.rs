//! The files of a store: made, opened, removed and measured.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise},
    sys::statvfs::statvfs,
};

use crate::{
    IoContext, TierError,
    nvme::{
        lock::LOCK_NAME,
        segment::{BLOCK, BLOCK_LEN, Geometry, NotASegment, Page},
        warm,
    },
};

const PREFIX: &str = "seg-";
const SUFFIX: &str = ".kvb";
const TEMPORARY: &str = ".tmp";

/// An open file of the store.
#[derive(Debug)]
pub(super) struct SegmentFile {
    file: File,
    path: PathBuf,
    direct: bool,
    registered: Option<u32>,
}

impl SegmentFile {
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it bypasses the page cache.
    pub(super) fn direct(&self) -> bool {
        self.direct
    }

    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Its place in the ring's table of files.
    pub(super) fn registered(&self) -> Option<u32> {
        self.registered
    }

    pub(super) fn set_registered(&mut self, index: u32) {
        self.registered = Some(index);
    }

    /// The same file through the page cache.
    pub(super) fn reopen_buffered(&self) -> Result<Self, TierError> {
        open(&self.path, false)
    }

    /// Lets the page cache forget a range of clean pages.
    pub(super) fn forget_cached(&self, offset: u64, bytes: u64) {
        let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return };
        let _ = posix_fadvise(&self.file, offset, bytes, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }

    pub(super) fn context(&self, call: &'static str, offset: u64, length: u64) -> IoContext {
        IoContext { call, path: self.path.clone(), offset, length }
    }

    #[cfg(test)]
    pub(super) fn for_tests(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { file, path: path.to_owned(), direct: false, registered: None }
    }
}

fn failed(call: &'static str, path: &Path, length: u64) -> impl FnOnce(io::Error) -> TierError {
    let context = IoContext { call, path: path.to_owned(), offset: 0, length };
    move |error| TierError::io(context, error)
}

fn options(direct: bool) -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = if direct { libc::O_DIRECT } else { 0 };
    options.read(true).write(true).mode(0o600).custom_flags(flags | libc::O_NOFOLLOW);
    options
}

pub(super) fn open(path: &Path, direct: bool) -> Result<SegmentFile, TierError> {
    let file = options(direct).open(path).map_err(failed("open", path, 0))?;
    Ok(SegmentFile::new(file, path.to_owned(), direct))
}

impl SegmentFile {
    fn new(file: File, path: PathBuf, direct: bool) -> Self {
        if !direct {
            // Chunks are read whole and once: read-ahead beyond them is waste.
            let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
        }
        Self { file, path, direct, registered: None }
    }
}

/// A file for trying out how I/O works here, already without a name.
pub(super) fn scratch(directory: &Path, direct: bool) -> Result<SegmentFile, TierError> {
    let path = directory.join(format!("probe{TEMPORARY}"));
    let _ = fs::remove_file(&path);
    let opened = options(direct).create_new(true).open(&path);
    // The file system may make the file and then refuse the flag.
    let _ = fs::remove_file(&path);
    let file = opened.map_err(failed("open", &path, 0))?;
    Ok(SegmentFile::new(file, path, direct))
}

/// A new segment, zero everywhere behind its header.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) file: SegmentFile,
    /// Why the space is not reserved: the file system cannot, so a full one shows when chunks are written.
    pub(super) sparse: Option<Errno>,
}

/// Makes a segment file: reserved, headed, then named, so that a named segment is whole. Blocks for a few milliseconds.
pub(super) fn make(directory: &Path, geometry: &Geometry, direct: bool) -> Result<Made, TierError> {
    let name = name_of(geometry.segment_id);
    let path = directory.join(&name);
    let temporary = directory.join(format!("{name}{TEMPORARY}"));
    let made = make_at(&temporary, geometry, direct).and_then(|(file, sparse)| {
        fs::rename(&temporary, &path).map_err(failed("rename", &temporary, 0))?;
        Ok(Made { file: SegmentFile::new(file, path, direct), sparse })
    });
    if made.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    made
}

fn make_at(
    path: &Path,
    geometry: &Geometry,
    direct: bool,
) -> Result<(File, Option<Errno>), TierError> {
    let bytes = geometry.file_bytes();
    let file = options(direct).create_new(true).open(path).map_err(failed("open", path, bytes))?;
    let length = i64::try_from(bytes).unwrap_or(i64::MAX);
    let sparse = match fallocate(&file, FallocateFlags::empty(), 0, length) {
        Ok(()) => None,
        Err(errno @ (Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL)) => {
            file.set_len(bytes).map_err(failed("ftruncate", path, bytes))?;
            Some(errno)
        }
        Err(errno) => return Err(failed("fallocate", path, bytes)(errno.into())),
    };
    file.write_all_at(&geometry.encode().0, 0).map_err(failed("write", path, BLOCK))?;
    Ok((file, sparse))
}

pub(super) fn name_of(segment_id: u64) -> String {
    format!("{PREFIX}{segment_id:016x}{SUFFIX}")
}

/// The number in the name of a segment file, whatever the file holds.
pub(super) fn id_in(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    u64::from_str_radix(name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?, 16).ok()
}

fn is_index_name(name: &OsStr) -> bool {
    name.to_str().is_some_and(warm::is_index_name)
}

/// What a file in the directory is.
#[derive(Debug)]
pub(super) enum Found {
    Segment(SegmentFile, Geometry),
    /// Ours and broken beyond use.
    Damaged(PathBuf, &'static str),
    /// Counts, and is left alone.
    LeftAlone(PathBuf, String),
    /// Left by a run that was interrupted.
    Stale(PathBuf),
}

/// Looks at everything in the directory, in the order of names.
pub(super) fn look(directory: &Path, direct: bool) -> Result<Vec<Found>, TierError> {
    let mut names = fs::read_dir(directory)
        .and_then(|entries| {
            entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()
        })
        .map_err(failed("readdir", directory, 0))?;
    names.sort();
    let mut found = Vec::new();
    let is_other = |name: &&OsString| *name != LOCK_NAME && !is_index_name(name);
    for name in names.iter().filter(is_other) {
        let path = directory.join(name);
        found.push(match name.to_str() {
            Some(name) if name.starts_with(PREFIX) && name.ends_with(SUFFIX) => {
                look_at(&path, direct)
            }
            Some(name)
                if name.ends_with(TEMPORARY)
                    && (name.starts_with(PREFIX) || name.starts_with("probe")) =>
            {
                Found::Stale(path)
            }
            _ => Found::LeftAlone(path, "not a file of this store".to_owned()),
        });
    }
    Ok(found)
}

fn look_at(path: &Path, direct: bool) -> Found {
    let left = |why: String| Found::LeftAlone(path.to_owned(), why);
    let file = match open(path, direct) {
        Ok(file) => file,
        Err(error) => return left(error.to_string()),
    };
    let length = match file.file().metadata() {
        Ok(metadata) if metadata.is_file() => metadata.len(),
        Ok(_) => return left("not a regular file".to_owned()),
        Err(error) => return left(error.to_string()),
    };
    if length < BLOCK {
        return Found::Damaged(path.to_owned(), "shorter than its header");
    }
    let mut page = Page::zeroed();
    match file.file().read_at(&mut page.0, 0) {
        Ok(BLOCK_LEN) => {}
        Ok(_) => return left("its header cannot be read whole".to_owned()),
        Err(error) => return left(error.to_string()),
    }
    match Geometry::parse(&page) {
        Ok(geometry) if geometry.file_bytes() != length => {
            Found::Damaged(path.to_owned(), "its length is not what its header says")
        }
        Ok(geometry) if id_in(path) != Some(geometry.segment_id) => {
            left(format!("it holds segment {:016x}", geometry.segment_id))
        }
        Ok(geometry) => Found::Segment(file, geometry),
        Err(NotASegment::Foreign) => left("no segment magic".to_owned()),
        Err(NotASegment::Newer(version)) => {
            left(format!("segment format version {version}, this reader knows 1"))
        }
        Err(NotASegment::Damaged(what)) => Found::Damaged(path.to_owned(), what),
    }
}

/// Free space of the file system, for one who is not root; `None` if it does not say.
pub(super) fn available_bytes(directory: &Path) -> Option<u64> {
    let about = statvfs(directory).ok()?;
    Some(about.blocks_available().saturating_mul(about.fragment_size()))
}

/// Removes a file of the store; one that is already gone is fine.
pub(super) fn remove(path: &Path) -> Result<(), TierError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("unlink", path, 0)(error))
        }
        _ => Ok(()),
    }
}

/// What a directory takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    /// All but index files.
    pub(super) bytes: u64,
    /// Index files.
    pub(super) index_bytes: u64,
}

/// Bytes of everything in and under `directory`, itself included, as `du` counts them, or its length where that is
/// more: a sparse file may fill up at any time. `bounds` are what files (by name) may grow to without a further word.
pub(super) fn measure(
    directory: &Path,
    bounds: &HashMap<OsString, u64>,
) -> Result<Measured, TierError> {
    let metadata = fs::metadata(directory).map_err(failed("stat", directory, 0))?;
    let (mut total, mut index) = (metadata.blocks() * 512, 0);
    for entry in fs::read_dir(directory).map_err(failed("readdir", directory, 0))? {
        let entry = entry.map_err(failed("readdir", directory, 0))?;
        // What vanishes meanwhile takes no space.
        let Ok(metadata) = entry.metadata() else { continue };
        if is_index_name(&entry.file_name()) {
            index += metadata.blocks() * 512;
        } else if metadata.is_dir() {
            let below = measure(&entry.path(), &HashMap::new());
            total += below.map_or(0, |below| below.bytes + below.index_bytes);
        } else {
            let bound = bounds.get(&entry.file_name()).copied().unwrap_or(0);
            let length = metadata.len().next_multiple_of(BLOCK);
            total += (metadata.blocks() * 512).max(length).max(bound);
        }
    }
    Ok(Measured { bytes: total, index_bytes: index })
}
