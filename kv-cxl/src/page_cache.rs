//! A file on flash whose page cache is the fast memory.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};

use crate::{
    ArenaView, Caps, Extent, FastTier, FastTierError, Flush, Load, Medium, MediumReader,
    Protection, Residency, ResidencyReport, StageEvent, StageId, Staging, coalesce,
    extent::distinct,
    granules::GranuleSet,
    map::{Access, Mapping, cached_bytes, context},
    stager::Stager,
    total_bytes,
};

/// Bit of CAP_IPC_LOCK in a capability set.
const CAP_IPC_LOCK: u32 = 14;
/// Populating again what did not stay, so many times.
const ROUNDS: u32 = 2;

/// What a page-cache provider shall be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PageCacheConfig {
    /// The file; made with mode 0600 if absent. Nobody else may map it, or evicting does nothing.
    pub path: PathBuf,
    /// Bytes of the arena, allocated at open; a multiple of `granule_bytes`. `None`: as long as the file is.
    pub bytes: Option<u64>,
    /// Most bytes protected at once. **Keep it below the limit of the memory cgroup**, less a tenth and the heap: locking
    /// over that limit is not an error, it kills the process.
    pub pin_limit_bytes: u64,
    /// Bytes of page cache that the file may have, if that is known (a cgroup's limit).
    pub fast_bytes: Option<u64>,
    /// Granule of staging and protection, a power of two of at least a page. Pages of the cache may be as large as 2 MiB,
    /// and a part of one cannot be evicted.
    pub granule_bytes: u64,
    /// Stagings in flight.
    pub queue_ops_max: usize,
    /// One call brings in so much.
    pub piece_bytes: u64,
    /// Whether to lock.
    pub pinning: Pinning,
}

impl PageCacheConfig {
    /// Defaults: granules of 2 MiB, 64 stagings in flight, pieces of 16 MiB, locked if the process may.
    pub fn new(path: impl Into<PathBuf>, pin_limit_bytes: u64) -> Self {
        Self {
            path: path.into(),
            bytes: None,
            pin_limit_bytes,
            fast_bytes: None,
            granule_bytes: 2 << 20,
            queue_ops_max: 64,
            piece_bytes: 16 << 20,
            pinning: Pinning::IfAllowed,
        }
    }
}

/// Whether protection locks pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pinning {
    /// With CAP_IPC_LOCK pages are locked and protection is hard; without, it is advisory.
    IfAllowed,
    /// Nothing is locked, protection is advisory.
    Advisory,
}

/// A file on flash, with the kernel's page cache as its fast memory.
///
/// * **Stages** by populating the mapping, on a thread of its own, in pieces. The kernel's success does not say that
///   the pages stayed, so they are counted and what is missing is populated again; who wants to know what is there
///   asks [`residency`](FastTier::residency).
/// * **Protects** by locking pages as they come in. Without CAP_IPC_LOCK that is bounded by a limit of some megabytes,
///   so protection is declared advisory and nothing is locked.
/// * **Residency** is exact: pages in memory and up to date. Of a file that it may not write a process is told that
///   everything is there, so such a file is asked by its descriptor, and where that is denied residency is unknown.
/// * **Reads** go through the descriptor ([`FileMedium`]): what cannot be read is an error and not a signal.
#[derive(Debug)]
pub struct PageCacheFlash {
    caps: Caps,
    /// Before the mapping: the thread ends first.
    stager: Stager,
    mapping: Arc<Mapping>,
    file: Arc<File>,
    path: PathBuf,
    writable: bool,
    protected: GranuleSet,
}

impl PageCacheFlash {
    /// Opens, and locks against other processes, the file; allocates what it lacks.
    pub fn open(config: PageCacheConfig) -> Result<Self, FastTierError> {
        let path = config.path.clone();
        let (file, writable) = open_file(&path)?;
        lock_exclusively(&file, &path)?;
        let capacity_bytes = size(&file, &config, writable)?;
        let mut caps = Caps::new(capacity_bytes, config.granule_bytes);
        caps.map_align_bytes = config.granule_bytes;
        caps.fast_bytes = config.fast_bytes;
        caps.pin_limit_bytes = Some(config.pin_limit_bytes);
        caps.queue_ops_max = config.queue_ops_max;
        caps.staging = Staging::Blocking;
        caps.evict = true;
        caps.flush = Flush::Fsync;
        caps.protection = match config.pinning {
            Pinning::IfAllowed if may_lock() => Protection::Hard,
            _ => Protection::Advisory,
        };
        caps.validate()?;
        let extent = Extent { offset: 0, bytes: capacity_bytes };
        let mapping = Arc::new(Mapping::new(&file, &path, extent, Access::Read)?);
        if config.granule_bytes < mapping.page_bytes() as u64 {
            return Err(FastTierError::Caps {
                field: "granule_bytes",
                fix: "at least the size of a page",
            });
        }
        caps.residency = match (writable, cached_bytes(&file, extent)) {
            (false, None) => ResidencyReport::Unknown,
            _ => ResidencyReport::Exact,
        };
        let staged = Arc::clone(&mapping);
        let stager = Stager::start(
            "kv-cxl-page-cache",
            config.queue_ops_max,
            config.piece_bytes,
            Box::new(move |piece| bring_in(&staged, piece, writable)),
        )
        .map_err(|error| FastTierError::io(context("spawn a thread", &path, extent), &error))?;
        let protected = GranuleSet::new(config.granule_bytes);
        Ok(Self { caps, stager, mapping, file: Arc::new(file), path, writable, protected })
    }

    /// The bytes of the file, as a medium of chunks.
    pub fn medium(&self) -> FileMedium {
        FileMedium {
            file: Arc::clone(&self.file),
            path: self.path.clone(),
            bytes: self.caps.capacity_bytes,
        }
    }

    fn resident_bytes(&self, extent: Extent) -> Result<Option<u64>, FastTierError> {
        if self.writable {
            return Ok(Some(in_memory(&self.mapping, extent)?));
        }
        Ok(cached_bytes(&self.file, extent))
    }

    /// Locks, and maps what is there already: only what is mapped is locked.
    fn lock(&self, extent: Extent) -> Result<(), FastTierError> {
        self.mapping.lock_on_fault(extent)?;
        for run in resident_runs(&self.mapping, extent)? {
            // What cannot be read now is told when it is staged.
            let _ = self.mapping.populate(run);
        }
        Ok(())
    }
}

impl FastTier for PageCacheFlash {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn arena(&self) -> ArenaView {
        ArenaView { bytes: self.mapping.bytes(), base_address: Some(self.mapping.base_address()) }
    }

    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError> {
        self.caps.check(extents)?;
        if self.caps.residency == ResidencyReport::Unknown {
            return Ok(Residency::Unknown);
        }
        let mut bytes = 0;
        for extent in distinct(extents) {
            match self.resident_bytes(extent)? {
                Some(resident) => bytes += resident,
                None => return Ok(Residency::Unknown),
            }
        }
        Ok(Residency::Bytes(bytes))
    }

    fn submit_stage(
        &mut self,
        id: StageId,
        extents: &[Extent],
        now_ns: u64,
    ) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        self.stager.submit(id, distinct(extents), now_ns)
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<StageEvent>) -> Option<u64> {
        self.stager.poll(now_ns, events)
    }

    fn protect(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        let fresh = self.protected.select(extents, false);
        let asked_bytes = total_bytes(&fresh);
        let limit = self.caps.pin_limit_bytes.unwrap_or(0);
        let free_bytes = limit.saturating_sub(self.protected.bytes());
        if asked_bytes > free_bytes {
            return Err(FastTierError::NoCapacity { asked_bytes, free_bytes });
        }
        if self.caps.protection == Protection::Hard {
            for (count, extent) in fresh.iter().enumerate() {
                if let Err(error) = self.lock(*extent) {
                    for locked in &fresh[..=count] {
                        let _ = self.mapping.unlock(*locked);
                    }
                    return Err(no_capacity(error, asked_bytes));
                }
            }
        }
        self.protected.insert(&fresh);
        Ok(())
    }

    fn unprotect(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        let ended = self.protected.select(extents, true);
        if self.caps.protection == Protection::Hard {
            ended.iter().try_for_each(|extent| self.mapping.unlock(*extent))?;
        }
        self.protected.remove(&ended);
        Ok(())
    }

    /// Evicts what is not protected, not dirty (flush first) and not mapped by anybody else.
    fn evict_hint(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        for extent in self.protected.select(extents, false) {
            self.mapping.drop_pages(extent)?;
            let (offset, bytes) = (signed(extent.offset), signed(extent.bytes));
            let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            posix_fadvise(&self.file, offset, bytes, advice).map_err(|errno| {
                FastTierError::io(context("fadvise", &self.path, extent), &errno.into())
            })?;
        }
        Ok(())
    }

    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        sync_data(&self.file, &self.path, self.caps.capacity_bytes)
    }

    fn load(&self) -> Load {
        self.stager.load()
    }
}

/// The bytes of a file, read and written through its descriptor.
#[derive(Clone, Debug)]
pub struct FileMedium {
    file: Arc<File>,
    path: PathBuf,
    bytes: u64,
}

impl Medium for FileMedium {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        let extent = self.inside(offset, into.len())?;
        self.file
            .read_exact_at(into, offset)
            .map_err(|error| FastTierError::io(context("read", &self.path, extent), &error))
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        let extent = self.inside(offset, from.len())?;
        self.file
            .write_all_at(from, offset)
            .map_err(|error| FastTierError::io(context("write", &self.path, extent), &error))
    }

    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError> {
        self.inside(extent.offset, usize::try_from(extent.bytes).unwrap_or(usize::MAX))?;
        sync_data(&self.file, &self.path, self.bytes)
    }

    fn reader(&self) -> Option<Arc<dyn MediumReader>> {
        Some(Arc::new(self.clone()))
    }
}

impl MediumReader for FileMedium {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        Medium::read(self, offset, into)
    }
}

impl FileMedium {
    fn inside(&self, offset: u64, bytes: usize) -> Result<Extent, FastTierError> {
        let extent = Extent { offset, bytes: bytes as u64 };
        let capacity_bytes = self.bytes;
        let is_inside = extent.end().is_some_and(|end| end <= capacity_bytes);
        is_inside.then_some(extent).ok_or(FastTierError::OutOfArena { extent, capacity_bytes })
    }
}

fn sync_data(file: &File, path: &Path, bytes: u64) -> Result<(), FastTierError> {
    let whole = Extent { offset: 0, bytes };
    file.sync_data().map_err(|error| FastTierError::io(context("fdatasync", path, whole), &error))
}

/// Populates, and looks whether it helped.
fn bring_in(mapping: &Mapping, piece: Extent, can_look: bool) -> Result<(), FastTierError> {
    for _ in 0..ROUNDS {
        mapping.populate(piece)?;
        if !can_look || in_memory(mapping, piece)? >= piece.bytes {
            break;
        }
    }
    Ok(())
}

fn in_memory(mapping: &Mapping, extent: Extent) -> Result<u64, FastTierError> {
    let pages = mapping.pages_in_memory(extent)?;
    let resident = pages.iter().filter(|page| **page & 1 == 1).count();
    Ok((resident as u64 * mapping.page_bytes() as u64).min(extent.bytes))
}

fn resident_runs(mapping: &Mapping, extent: Extent) -> Result<Vec<Extent>, FastTierError> {
    let bytes = mapping.page_bytes() as u64;
    let pages = mapping.pages_in_memory(extent)?;
    let mut runs: Vec<Extent> = (0_u64..)
        .zip(pages)
        .filter(|(_, page)| page & 1 == 1)
        .map(|(index, _)| Extent { offset: extent.offset + index * bytes, bytes })
        .collect();
    coalesce(&mut runs);
    Ok(runs)
}

/// Where the system has no more room for locked pages there is no capacity.
fn no_capacity(error: FastTierError, asked_bytes: u64) -> FastTierError {
    match error {
        FastTierError::Io { errno, .. } if [libc::ENOMEM, libc::EAGAIN].contains(&errno) => {
            FastTierError::NoCapacity { asked_bytes, free_bytes: 0 }
        }
        other => other,
    }
}

fn open_file(path: &Path) -> Result<(File, bool), FastTierError> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    match opened {
        Ok(file) => Ok((file, true)),
        Err(error) if [libc::EACCES, libc::EROFS].map(Some).contains(&error.raw_os_error()) => {
            let file = File::open(path);
            file.map(|file| (file, false))
                .map_err(|_| FastTierError::io(context("open", path, Extent::default()), &error))
        }
        Err(error) => Err(FastTierError::io(context("open", path, Extent::default()), &error)),
    }
}

pub(crate) fn lock_exclusively(file: &File, path: &Path) -> Result<(), FastTierError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(FastTierError::Setup {
            path: path.to_owned(),
            problem: "another process, or another tier of this one, uses it".into(),
            fix: "give each engine its own device or part of one".into(),
        }),
        Err(TryLockError::Error(error)) => {
            Err(FastTierError::io(context("flock", path, Extent::default()), &error))
        }
    }
}

/// The bytes of the arena, allocated.
fn size(file: &File, config: &PageCacheConfig, writable: bool) -> Result<u64, FastTierError> {
    let failed = |call, bytes, error: &io::Error| {
        FastTierError::io(context(call, &config.path, Extent { offset: 0, bytes }), error)
    };
    let metadata = file.metadata().map_err(|error| failed("stat", 0, &error))?;
    if !metadata.is_file() {
        return Err(FastTierError::Setup {
            path: config.path.clone(),
            problem: "it is not a regular file, so it has no page cache of its own".into(),
            fix: "name a file on a local file system; a DAX device is opened as DeviceDax".into(),
        });
    }
    let Some(bytes) = config.bytes else { return Ok(metadata.len()) };
    if bytes > metadata.len() && writable {
        fallocate(file, FallocateFlags::empty(), 0, signed(bytes))
            .map_err(|errno| failed("fallocate", bytes, &errno.into()))?;
    } else if bytes > metadata.len() {
        return Err(FastTierError::Setup {
            path: config.path.clone(),
            problem: format!("it has {} bytes and may not be written", metadata.len()),
            fix: format!("make it {bytes} bytes long, or ask for less"),
        });
    }
    Ok(bytes)
}

/// A file offset as the system wants it; what does not fit is refused by it.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Whether the process has CAP_IPC_LOCK.
fn may_lock() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1)
}
