//! A Device-DAX character device: memory that is addressed byte by byte, with no file system and no page cache.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::sys::stat::{major, minor};

use crate::{
    ArenaView, Caps, Extent, FastTier, FastTierError, Flush, Load, Medium, MediumReader, Residency,
    StageEvent, StageId, Staging,
    extent::distinct,
    map::{Access, Copies, FLUSHES_LINES, Mapping, context},
    page_cache::lock_exclusively,
    stager::Stager,
};

/// Smallest unit that is staged or flushed.
const GRANULE_BYTES: u64 = 4096;
/// The thread touches so much between two looks at whether it shall end.
const PIECE_BYTES: u64 = 4 << 20;

/// Which part of which device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceDaxConfig {
    /// `/dev/dax0.0`, or a regular file that stands in for it.
    pub path: PathBuf,
    /// First byte; a multiple of the device's alignment.
    pub offset_bytes: u64,
    /// Length, a multiple of the alignment; `None`: all that is behind `offset_bytes`.
    pub bytes: Option<u64>,
    /// Stagings in flight.
    pub queue_ops_max: usize,
}

impl DeviceDaxConfig {
    /// The whole device, 64 stagings in flight.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), offset_bytes: 0, bytes: None, queue_ops_max: 64 }
    }
}

/// What a device says of itself. Asked from sysfs: a DAX device's file has length 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DaxInfo {
    /// Its length.
    pub bytes: u64,
    /// What offsets and lengths of mappings must be multiples of.
    pub align_bytes: u64,
    /// The NUMA node that its memory would be as system RAM.
    pub numa_node: Option<u32>,
    /// False for a regular file that stands in for a device.
    pub is_device: bool,
}

impl DaxInfo {
    /// Asks about the device at `path`, without opening it.
    pub fn of(path: &Path) -> Result<Self, FastTierError> {
        let metadata = fs::metadata(path)
            .map_err(|error| FastTierError::io(context("stat", path, Extent::default()), &error))?;
        if metadata.is_file() {
            let align_bytes = GRANULE_BYTES;
            let bytes = metadata.len() / align_bytes * align_bytes;
            return Ok(Self { bytes, align_bytes, numa_node: None, is_device: false });
        }
        if !metadata.file_type().is_char_device() {
            return Err(no_dax(path, "neither a DAX device nor a regular file"));
        }
        let number = metadata.rdev();
        let node = format!("/sys/dev/char/{}:{}", major(number), minor(number));
        Self::from_sysfs(path, Path::new(&node))
    }

    fn from_sysfs(path: &Path, node: &Path) -> Result<Self, FastTierError> {
        let subsystem = fs::read_link(node.join("subsystem")).unwrap_or_default();
        if subsystem.file_name().is_none_or(|name| name != "dax") {
            return Err(no_dax(path, "a character device of another kind"));
        }
        let read = |name: &'static str| {
            let file = node.join(name);
            let text = fs::read_to_string(&file).map_err(|error| {
                FastTierError::io(context("read", &file, Extent::default()), &error)
            })?;
            number(&text).filter(|&value| value > 0).ok_or_else(|| FastTierError::Setup {
                path: path.to_owned(),
                problem: format!("{} says `{}`", file.display(), text.trim()),
                fix: "create the device again (`ndctl create-namespace -m devdax`, or `daxctl \
                      create-device`)"
                    .into(),
            })
        };
        let target = fs::read_to_string(node.join("target_node")).unwrap_or_default();
        Ok(Self {
            bytes: read("size")?,
            align_bytes: read("align")?,
            numa_node: target.trim().parse().ok(),
            is_device: true,
        })
    }

    /// The extent that `config` names, or what is wrong with it. The system maps what lies behind the end, and kills who
    /// touches it; of what is misaligned it only says EINVAL.
    fn extent(&self, config: &DeviceDaxConfig) -> Result<Extent, FastTierError> {
        let Self { bytes: device_bytes, align_bytes, .. } = *self;
        let offset = config.offset_bytes;
        let bytes = config.bytes.unwrap_or_else(|| device_bytes.saturating_sub(offset));
        let wrong =
            |problem, fix| Err(FastTierError::Setup { path: config.path.clone(), problem, fix });
        for (name, value) in [("offset_bytes", offset), ("bytes", bytes)] {
            if !value.is_multiple_of(align_bytes) {
                let (below, above) = (value / align_bytes, value / align_bytes + 1);
                return wrong(
                    format!("`{name}` {value} is no multiple of its alignment {align_bytes}"),
                    format!("use {} or {}", below * align_bytes, above.saturating_mul(align_bytes)),
                );
            }
        }
        let extent = Extent { offset, bytes };
        if extent.end().is_none_or(|end| end > device_bytes) {
            return wrong(
                format!("{extent} ends behind the device, which has {device_bytes} bytes"),
                format!("use at most {} bytes", device_bytes.saturating_sub(offset)),
            );
        }
        if bytes == 0 {
            return wrong("nothing of it is used".into(), format!("use {align_bytes} or more"));
        }
        Ok(extent)
    }
}

/// Memory of a Device-DAX device, or of a part of it.
///
/// Such memory can only be touched: what lies behind it, whether flash with a fast memory in front or plain DRAM, is not
/// visible. So residency is unknown and there is no protection (locking succeeds there and protects nothing). Staging is
/// touching every page on a thread of its own, through the kernel. A flush writes cache lines back; the system's ways
/// (fsync, msync) are errors on such a device.
///
/// A regular file can stand in for the device, in tests or where there is none: then a flush is a sync of the file.
#[derive(Debug)]
pub struct DeviceDax {
    caps: Caps,
    info: DaxInfo,
    stager: Option<Stager>,
    mapping: Arc<Mapping>,
    /// Keeps the lock.
    file: Arc<File>,
}

impl DeviceDax {
    /// Opens, locks against other processes, and maps.
    pub fn open(config: &DeviceDaxConfig) -> Result<Self, FastTierError> {
        let path = &config.path;
        let info = DaxInfo::of(path)?;
        let extent = info.extent(config)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| explain_open(path, &error))?;
        lock_exclusively(&file, path)?;
        let mapping = Arc::new(Mapping::new(&file, path, extent, Access::ReadWrite)?);
        let mut caps = Caps::new(extent.bytes, GRANULE_BYTES);
        caps.map_align_bytes = info.align_bytes;
        caps.numa_node = info.numa_node;
        caps.flush = match (info.is_device, FLUSHES_LINES) {
            (false, _) => Flush::Fsync,
            (true, true) => Flush::CacheLines,
            (true, false) => Flush::None,
        };
        let stager = match mapping.copies() {
            Copies::Direct => None,
            Copies::Kernel => {
                let touched = Arc::clone(&mapping);
                let touch = Box::new(move |piece| touched.touch(piece));
                let stager = Stager::start("kv-cxl-dax", config.queue_ops_max, PIECE_BYTES, touch);
                Some(stager.map_err(|error| {
                    FastTierError::io(context("spawn a thread", path, extent), &error)
                })?)
            }
        };
        if stager.is_some() {
            caps.staging = Staging::Blocking;
            caps.queue_ops_max = config.queue_ops_max;
        }
        caps.validate()?;
        Ok(Self { caps, info, stager, mapping, file: Arc::new(file) })
    }

    /// What the device said of itself.
    pub fn info(&self) -> DaxInfo {
        self.info
    }

    /// The bytes, as a medium of chunks.
    pub fn medium(&self) -> DaxMedium {
        DaxMedium {
            mapping: Arc::clone(&self.mapping),
            _file: Arc::clone(&self.file),
            flush: self.caps.flush,
        }
    }
}

impl FastTier for DeviceDax {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn arena(&self) -> ArenaView {
        ArenaView { bytes: self.mapping.bytes(), base_address: Some(self.mapping.base_address()) }
    }

    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError> {
        self.caps.check(extents).map(|()| Residency::Unknown)
    }

    fn submit_stage(
        &mut self,
        id: StageId,
        extents: &[Extent],
        now_ns: u64,
    ) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        match &mut self.stager {
            Some(stager) => stager.submit(id, distinct(extents), now_ns),
            None => Err(FastTierError::Unsupported { call: "stage" }),
        }
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<StageEvent>) -> Option<u64> {
        self.stager.as_mut()?.poll(now_ns, events)
    }

    fn protect(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        Err(FastTierError::Unsupported { call: "protect" })
    }

    fn unprotect(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)
    }

    /// Does nothing: the system's hints drop or corrupt mappings of such devices.
    fn evict_hint(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)
    }

    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        extents.iter().try_for_each(|extent| flush(&self.mapping, self.caps.flush, *extent))
    }

    fn load(&self) -> Load {
        let unknown = Load { queued_bytes: None, bytes_per_s: None };
        self.stager.as_ref().map_or(unknown, Stager::load)
    }
}

/// The bytes of a Device-DAX device, copied in and out.
#[derive(Clone, Debug)]
pub struct DaxMedium {
    mapping: Arc<Mapping>,
    /// Keeps the lock as long as the bytes are used.
    _file: Arc<File>,
    flush: Flush,
}

impl Medium for DaxMedium {
    fn path(&self) -> &Path {
        self.mapping.path()
    }

    fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        self.mapping.read(offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        self.mapping.write(offset, from)
    }

    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError> {
        flush(&self.mapping, self.flush, extent)
    }

    fn reader(&self) -> Option<Arc<dyn MediumReader>> {
        Some(Arc::new(self.clone()))
    }
}

impl MediumReader for DaxMedium {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        self.mapping.read(offset, into)
    }
}

fn flush(mapping: &Mapping, how: Flush, extent: Extent) -> Result<(), FastTierError> {
    match how {
        Flush::CacheLines => mapping.flush_lines(extent),
        Flush::Fsync => mapping.sync(extent),
        Flush::None => Ok(()),
    }
}

fn no_dax(path: &Path, what: &str) -> FastTierError {
    FastTierError::Setup {
        path: path.to_owned(),
        problem: format!("it is {what}"),
        fix: "name a device like /dev/dax0.0 (`daxctl list` shows them)".into(),
    }
}

/// A CXL RAM region's device is born as system RAM: it is there, and opening it says "no such device or address".
fn explain_open(path: &Path, error: &io::Error) -> FastTierError {
    if error.raw_os_error() != Some(libc::ENXIO) {
        return FastTierError::io(context("open", path, Extent::default()), error);
    }
    let name = path.file_name().unwrap_or_default().display();
    let driver = fs::read_link(format!("/sys/bus/dax/devices/{name}/driver")).ok();
    let driver = driver.as_deref().and_then(Path::file_name);
    let problem = match driver {
        Some(driver) if driver == "kmem" => {
            "it is in system-ram mode, so it cannot be opened (ENXIO)".into()
        }
        Some(driver) => format!("its driver {} does not open it (ENXIO)", driver.display()),
        None => "it has no driver, so it cannot be opened (ENXIO)".into(),
    };
    let fix = format!("run `daxctl reconfigure-device --mode=devdax --force {name}`");
    FastTierError::Setup { path: path.to_owned(), problem, fix }
}

/// A number as sysfs writes it.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A device as sysfs shows it.
    fn node(files: &[(&str, &str)]) -> tempfile::TempDir {
        let node = tempfile::tempdir().unwrap();
        symlink("../../bus/dax", node.path().join("subsystem")).unwrap();
        for (name, text) in files {
            fs::write(node.path().join(name), text).unwrap();
        }
        node
    }

    #[test]
    fn sizes_are_read_as_sysfs_writes_them() {
        let node =
            node(&[("size", "526385152\n"), ("align", "0x200000\n"), ("target_node", "6\n")]);
        let info = DaxInfo::from_sysfs(Path::new("/dev/dax0.0"), node.path()).unwrap();
        let expected = DaxInfo {
            bytes: 526_385_152,
            align_bytes: 2 << 20,
            numa_node: Some(6),
            is_device: true,
        };
        assert_eq!(info, expected);
    }

    #[test]
    fn a_device_without_memory_or_of_another_kind_is_refused() {
        let path = Path::new("/dev/dax0.0");
        let empty = node(&[("size", "0\n"), ("align", "2097152\n"), ("target_node", "-1\n")]);
        let refused = DaxInfo::from_sysfs(path, empty.path()).unwrap_err().to_string();
        assert!(refused.contains("says `0`") && refused.contains("create"), "{refused}");
        let other = tempfile::tempdir().unwrap();
        symlink("../../class/mem", other.path().join("subsystem")).unwrap();
        let refused = DaxInfo::from_sysfs(path, other.path()).unwrap_err().to_string();
        assert!(refused.contains("another kind"), "{refused}");
        let refused = DaxInfo::of(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(refused.contains("another kind"), "{refused}");
    }

    #[test]
    fn a_device_that_is_system_ram_is_explained() {
        let enxio = io::Error::from_raw_os_error(libc::ENXIO);
        let text = explain_open(Path::new("/dev/dax9.7"), &enxio).to_string();
        assert!(text.contains("ENXIO") && text.contains("--mode=devdax --force dax9.7"), "{text}");
    }
}
