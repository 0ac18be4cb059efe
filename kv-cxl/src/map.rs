//! The mapping of a device or file: the only unsafe code of this crate.
//!
//! Bytes move in and out through the kernel (`process_vm_readv` and `process_vm_writev` of our own process), so that a
//! page that cannot be read is an errno and not a signal that ends the process; it costs no more than a copy. Where a
//! sandbox denies those calls they are plain copies, which [`Copies`] says.

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    ops::Range,
    path::{Path, PathBuf},
    ptr,
    sync::{PoisonError, RwLock},
};

use kv_tiers::IoContext;
use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};
use nix::{
    errno::Errno,
    sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev},
    unistd::{Pid, SysconfVar, sysconf},
};

use crate::{Extent, FastTierError};

/// A probe touches so many bytes of every page.
const TOUCH_BYTES: usize = 64;
/// Most pages that one call of the kernel takes.
const TOUCH_PAGES_MAX: usize = 1024;
/// Smallest unit that memory is written back in.
const LINE_BYTES: usize = 64;

/// The system call's number, which is the same on every architecture; `libc` does not name it.
const CACHESTAT: libc::c_long = 451;

/// Whether cache lines can be written back on this processor.
pub(crate) const FLUSHES_LINES: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// How bytes move in and out of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// By the kernel: what cannot be read is an error.
    Kernel,
    /// By loads and stores: what cannot be read is a signal.
    Direct,
}

/// What a mapping is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

impl Copies {
    /// The kernel's, unless a sandbox denies the calls. Tried on memory of our own: a device is not touched for it.
    fn allowed() -> Self {
        let (from, mut into) = ([7_u8], [0_u8]);
        let remote = [RemoteIoVec { base: from.as_ptr() as usize, len: 1 }];
        let copied = process_vm_readv(Pid::this(), &mut [IoSliceMut::new(&mut into)], &remote);
        if copied == Ok(1) && into == from { Self::Kernel } else { Self::Direct }
    }
}

/// A shared mapping of part of a file, within which every access is checked.
#[derive(Debug)]
pub(crate) struct Mapping {
    raw: MmapRaw,
    path: PathBuf,
    page_bytes: usize,
    copies: Copies,
    /// Keeps direct copies of one process apart; the kernel's need nothing.
    direct: RwLock<()>,
}

impl Mapping {
    /// Maps `extent` of `file`, which must be whole units of the device's alignment and lie within it: both are checked
    /// by who knows them, since the system maps what is behind the end and kills whoever touches it.
    pub(crate) fn new(
        file: &File,
        path: &Path,
        extent: Extent,
        access: Access,
    ) -> Result<Self, FastTierError> {
        let failed = |error: &io::Error| FastTierError::io(context("mmap", path, extent), error);
        let bytes = usize::try_from(extent.bytes)
            .map_err(|_| failed(&io::Error::from_raw_os_error(libc::EOVERFLOW)))?;
        let mut options = MmapOptions::new();
        options.offset(extent.offset).len(bytes);
        let raw = match access {
            Access::ReadWrite => options.map_raw(file),
            Access::Read => options.map_raw_read_only(file),
        }
        .map_err(|error| failed(&error))?;
        Ok(Self {
            raw,
            path: path.to_owned(),
            page_bytes: page_bytes(),
            copies: Copies::allowed(),
            direct: RwLock::new(()),
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.raw.len() as u64
    }

    pub(crate) fn base_address(&self) -> usize {
        self.raw.as_mut_ptr() as usize
    }

    pub(crate) fn copies(&self) -> Copies {
        self.copies
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Copies out.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        let extent = Extent { offset, bytes: into.len() as u64 };
        let range = self.range(extent)?;
        if self.copies == Copies::Direct {
            let _shared = self.direct.read().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `range` lies within the mapping.
            let from = unsafe { self.raw.as_mut_ptr().add(range.start) };
            // SAFETY: `into` is as long as the range, is ours alone, and no direct write runs while the lock is held.
            unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
            return Ok(());
        }
        let mut done = 0;
        while done < into.len() {
            let base = self.base_address() + range.start + done;
            let remote = [RemoteIoVec { base, len: into.len() - done }];
            let mut local = [IoSliceMut::new(&mut into[done..])];
            done +=
                self.moved("read", extent, process_vm_readv(Pid::this(), &mut local, &remote))?;
        }
        Ok(())
    }

    /// Copies in. What this overlaps with must not be read at the same time, or may be read as a mixture.
    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        let extent = Extent { offset, bytes: from.len() as u64 };
        let range = self.range(extent)?;
        if self.copies == Copies::Direct {
            let _alone = self.direct.write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `range` lies within the mapping.
            let into = unsafe { self.raw.as_mut_ptr().add(range.start) };
            // SAFETY: `from` is as long as the range, and no other direct copy runs while the lock is held.
            unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
            return Ok(());
        }
        let mut done = 0;
        while done < from.len() {
            let base = self.base_address() + range.start + done;
            let remote = [RemoteIoVec { base, len: from.len() - done }];
            let local = [IoSlice::new(&from[done..])];
            done += self.moved("write", extent, process_vm_writev(Pid::this(), &local, &remote))?;
        }
        Ok(())
    }

    /// Loads some bytes of every page, so that a device brings them in; through the kernel, whatever [`Copies`] says.
    pub(crate) fn touch(&self, extent: Extent) -> Result<(), FastTierError> {
        let range = self.range(extent)?;
        let mut seen = vec![0; TOUCH_PAGES_MAX * TOUCH_BYTES];
        let pages: Vec<usize> = range.clone().step_by(self.page_bytes).collect();
        for some in pages.chunks(TOUCH_PAGES_MAX) {
            let remote: Vec<RemoteIoVec> = some
                .iter()
                .map(|&page| RemoteIoVec {
                    base: self.base_address() + page,
                    len: TOUCH_BYTES.min(range.end - page),
                })
                .collect();
            let bytes = remote.iter().map(|part| part.len).sum();
            let mut local = [IoSliceMut::new(&mut seen[..bytes])];
            let touched = process_vm_readv(Pid::this(), &mut local, &remote);
            if self.moved("touch", extent, touched)? < bytes {
                // The call stops at the page that it cannot read.
                return Err(self.failed("touch", extent, Errno::EFAULT));
            }
        }
        Ok(())
    }

    /// Brings the pages in and maps them. Success does **not** say that they are still there.
    pub(crate) fn populate(&self, extent: Extent) -> Result<(), FastTierError> {
        let range = self.range(extent)?;
        loop {
            match self.raw.advise_range(Advice::PopulateRead, range.start, range.len()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(FastTierError::io(self.context("populate", extent), &error));
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    /// Locks pages in memory as they come in.
    pub(crate) fn lock_on_fault(&self, extent: Extent) -> Result<(), FastTierError> {
        let (start, bytes) = self.pages(extent)?;
        // SAFETY: the range lies within the mapping; locking changes no byte.
        let result = unsafe { libc::mlock2(start.cast(), bytes, libc::MLOCK_ONFAULT) };
        self.done("mlock2", extent, result)
    }

    /// Ends that.
    pub(crate) fn unlock(&self, extent: Extent) -> Result<(), FastTierError> {
        let (start, bytes) = self.pages(extent)?;
        // SAFETY: the range lies within the mapping; unlocking changes no byte.
        let result = unsafe { libc::munlock(start.cast(), bytes) };
        self.done("munlock", extent, result)
    }

    /// Which pages are in memory and up to date, one bit 0 for each.
    pub(crate) fn pages_in_memory(&self, extent: Extent) -> Result<Vec<u8>, FastTierError> {
        let (start, bytes) = self.pages(extent)?;
        let mut pages = vec![0_u8; bytes.div_ceil(self.page_bytes)];
        // SAFETY: the range lies within the mapping, and `pages` has a byte for each of its pages.
        let result = unsafe { libc::mincore(start.cast(), bytes, pages.as_mut_ptr()) };
        self.done("mincore", extent, result)?;
        Ok(pages)
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Unmaps the pages; what is in the page cache stays there, and the next access maps it again.
    pub(crate) fn drop_pages(&self, extent: Extent) -> Result<(), FastTierError> {
        let range = self.range(extent)?;
        // SAFETY: of a shared mapping this drops translations, not bytes; nobody holds references into it.
        let result = unsafe {
            self.raw.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len())
        };
        result.map_err(|error| FastTierError::io(self.context("madvise", extent), &error))
    }

    /// Writes changed pages to the file behind, and waits. Device-DAX refuses it: there it is
    /// [`flush_lines`](Self::flush_lines).
    pub(crate) fn sync(&self, extent: Extent) -> Result<(), FastTierError> {
        let range = self.range(extent)?;
        self.raw
            .flush_range(range.start, range.len())
            .map_err(|error| FastTierError::io(self.context("msync", extent), &error))
    }

    /// Writes the cache lines back to memory, and waits: what was written before is in the memory before anything
    /// written after.
    pub(crate) fn flush_lines(&self, extent: Extent) -> Result<(), FastTierError> {
        let range = self.range(extent)?;
        let start = (self.base_address() + range.start) & !(LINE_BYTES - 1);
        let end = self.base_address() + range.end;
        write_back_lines(start, end);
        Ok(())
    }

    /// The bytes of `extent` in this mapping.
    fn range(&self, extent: Extent) -> Result<Range<usize>, FastTierError> {
        let capacity_bytes = self.bytes();
        let bounds = || {
            let start = usize::try_from(extent.offset).ok()?;
            let end = usize::try_from(extent.end()?).ok()?;
            (end <= self.raw.len()).then_some(start..end)
        };
        bounds().ok_or(FastTierError::OutOfArena { extent, capacity_bytes })
    }

    /// Start and length of `extent`, for calls that want whole pages at the start.
    fn pages(&self, extent: Extent) -> Result<(*mut u8, usize), FastTierError> {
        let range = self.range(extent)?;
        if !range.start.is_multiple_of(self.page_bytes) {
            let granule_bytes = self.page_bytes as u64;
            return Err(FastTierError::Misaligned { extent, granule_bytes });
        }
        // SAFETY: `range` lies within the mapping.
        Ok((unsafe { self.raw.as_mut_ptr().add(range.start) }, range.len()))
    }

    fn moved(
        &self,
        call: &'static str,
        extent: Extent,
        result: nix::Result<usize>,
    ) -> Result<usize, FastTierError> {
        match result {
            // Nothing moved and no error: it would be asked for ever.
            Ok(0) => Err(self.failed(call, extent, Errno::EIO)),
            Ok(bytes) => Ok(bytes),
            Err(errno) => Err(self.failed(call, extent, errno)),
        }
    }

    fn done(&self, call: &'static str, extent: Extent, result: i32) -> Result<(), FastTierError> {
        if result == 0 { Ok(()) } else { Err(self.failed(call, extent, Errno::last())) }
    }

    fn failed(&self, call: &'static str, extent: Extent, errno: Errno) -> FastTierError {
        FastTierError::Io { context: self.context(call, extent), errno: errno as i32 }
    }

    fn context(&self, call: &'static str, extent: Extent) -> IoContext {
        context(call, &self.path, extent)
    }
}

/// How many pages of a file the page cache holds, asked by its descriptor; `None` if the system does not say (before
/// Linux 6.5, or of a file that is neither ours nor writable). Pages that are still being read count.
pub(crate) fn cached_bytes(file: &File, extent: Extent) -> Option<u64> {
    use std::os::fd::AsRawFd;
    let range = [extent.offset, extent.bytes];
    let mut counts = [0_u64; 5];
    // SAFETY: the structures are five and two 64-bit words, live and ours; the descriptor is open.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0)
    };
    (result == 0).then(|| (counts[0] * page_bytes() as u64).min(extent.bytes))
}

pub(crate) fn context(call: &'static str, path: &Path, extent: Extent) -> IoContext {
    IoContext { call, path: path.to_owned(), offset: extent.offset, length: extent.bytes }
}

fn page_bytes() -> usize {
    let asked = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    asked.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(4096)
}

#[cfg(target_arch = "x86_64")]
fn write_back_lines(start: usize, end: usize) {
    use std::arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count, _mm_clflush, _mm_sfence},
    };
    let features = if __cpuid(0).eax < 7 { 0 } else { __cpuid_count(7, 0).ebx };
    let (clflushopt, clwb) = (features & 1 << 23 != 0, features & 1 << 24 != 0);
    for line in (start..end).step_by(LINE_BYTES) {
        if clwb {
            // SAFETY: the processor has it; the line is in a live mapping, and no byte of it changes.
            unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) };
        } else if clflushopt {
            // SAFETY: as above.
            unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
        } else {
            // SAFETY: every x86-64 has it; the line is in a live mapping.
            unsafe { _mm_clflush(line as *const u8) };
        }
    }
    // SAFETY: every x86-64 has it.
    unsafe { _mm_sfence() };
}

#[cfg(target_arch = "aarch64")]
fn write_back_lines(start: usize, end: usize) {
    use std::arch::asm;
    for line in (start..end).step_by(LINE_BYTES) {
        // SAFETY: the line is in a live mapping, and no byte of it changes.
        unsafe { asm!("dc cvac, {}", in(reg) line, options(nostack, preserves_flags)) };
    }
    // SAFETY: a barrier.
    unsafe { asm!("dsb sy", options(nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn write_back_lines(_start: usize, _end: usize) {}
