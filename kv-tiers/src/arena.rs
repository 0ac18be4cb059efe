//! The memory that every transfer lands in: one mapping, cut into equal slots.
//!
//! Host engines free their buffers on abort without telling us, and a transfer that a device has begun cannot be
//! recalled: so reads land in memory that is ours, and a slot belongs to exactly one holder until it is dropped.

use std::{
    fmt, io,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    process,
    ptr::NonNull,
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use memmap2::{Advice, MmapMut, MmapOptions};
use thiserror::Error;

const HUGE_PAGE_BYTES: usize = 2 << 20;
const SLOT_ALIGNMENT_BYTES: usize = 4096;
/// Arenas of this size lie on huge pages alone.
const HUGE_FROM_BYTES: usize = 8 << 20;

/// What an arena shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaConfig {
    /// Bytes of one slot; rounded up to 4 KiB.
    pub slot_bytes: usize,
    /// Number of slots.
    pub slots: usize,
    /// Lock the pages in memory; if the system refuses, the arena works unlocked and says so in its stats.
    pub lock: bool,
}

impl ArenaConfig {
    /// `slots` slots of `slot_bytes`, not locked.
    pub const fn new(slot_bytes: usize, slots: usize) -> Self {
        Self { slot_bytes, slots, lock: false }
    }
}

/// Why an arena cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// No slots, empty slots, or more bytes than an address space holds.
    #[error("arena of {slots} slots of {slot_bytes} bytes is impossible")]
    Size {
        /// As configured.
        slots: usize,
        /// As configured.
        slot_bytes: usize,
    },
    /// The system refused the memory.
    #[error("mapping {bytes} bytes for the arena failed")]
    Map {
        /// Asked for.
        bytes: usize,
        /// The system's words.
        source: io::Error,
    },
}

/// What the arena really is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaStats {
    /// Bytes of all slots.
    pub bytes: u64,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Slots nobody holds.
    pub free_slots: u64,
    /// Slots given up for good, because a device may still write them.
    pub leaked_slots: u64,
    /// Bytes backed by huge pages, asked from the system when the arena was made.
    pub huge_page_bytes: u64,
    /// Whether the pages are locked.
    pub locked: bool,
}

/// One 2 MiB-aligned mapping on huge pages where the system grants them, faulted in, not inherited by a fork.
pub struct Arena {
    /// Keeps the mapping; touched only through `base`. Always there until the arena is dropped.
    mapping: Option<MmapMut>,
    base: NonNull<u8>,
    slot_bytes: usize,
    slots: usize,
    unheld: Mutex<Unheld>,
    owner_pid: u32,
    huge_page_bytes: u64,
    locked: bool,
}

/// The slots that nobody holds.
struct Unheld {
    free: Vec<u32>,
    leaked: usize,
}

// SAFETY: `base` points into `mapping`, which lives as long as the arena; slots are handed out through `unheld`, each
// index to one `Slot` at a time, so two threads never hold one byte range.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`; all shared state is behind the mutex or immutable.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps and faults in the arena.
    pub fn new(config: ArenaConfig) -> Result<Arc<Self>, ArenaError> {
        let slot_bytes = config.slot_bytes.next_multiple_of(SLOT_ALIGNMENT_BYTES);
        let size_error = ArenaError::Size { slots: config.slots, slot_bytes: config.slot_bytes };
        let (Some(bytes), Ok(slots)) =
            (slot_bytes.checked_mul(config.slots), u32::try_from(config.slots))
        else {
            return Err(size_error);
        };
        // The last slots lie on a huge page, too: io_uring sees a registered buffer as huge only if all of it is. To a
        // small arena that page would be most of what is counted as locked.
        let page_bytes =
            if bytes < HUGE_FROM_BYTES { SLOT_ALIGNMENT_BYTES } else { HUGE_PAGE_BYTES };
        let whole_pages = bytes.checked_next_multiple_of(page_bytes).filter(|_| bytes > 0);
        let Some(mapped_bytes) = whole_pages.and_then(|it| it.checked_add(HUGE_PAGE_BYTES)) else {
            return Err(size_error);
        };
        let map_error = |source| ArenaError::Map { bytes: mapped_bytes, source };
        let mut mapping = MmapOptions::new().len(mapped_bytes).map_anon().map_err(map_error)?;
        // Advice is a request: without huge pages or DONTFORK the arena is slower or larger in a child, never wrong.
        let _ = mapping.advise(Advice::HugePage);
        let _ = mapping.advise(Advice::DontFork);
        if mapping.advise(Advice::PopulateWrite).is_err() {
            mapping.fill(0);
        }
        let locked = config.lock && mapping.lock().is_ok();
        let shift = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let base = NonNull::from(&mut mapping[shift..]).cast::<u8>();
        Ok(Arc::new(Self {
            huge_page_bytes: huge_page_bytes(base.as_ptr() as usize, bytes),
            mapping: Some(mapping),
            base,
            slot_bytes,
            slots: config.slots,
            unheld: Mutex::new(Unheld { free: (0..slots).rev().collect(), leaked: 0 }),
            owner_pid: process::id(),
            locked,
        }))
    }

    /// A slot nobody holds, or `None`: never waits. In a forked child there are none.
    pub fn try_take(self: &Arc<Self>) -> Option<Slot> {
        let index = self.unheld()?.free.pop()?;
        Some(Slot { arena: Arc::clone(self), index })
    }

    /// Number of slots nobody holds; 0 in a forked child.
    pub fn free_slots(&self) -> usize {
        self.unheld().map_or(0, |unheld| unheld.free.len())
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of one slot: a multiple of 4096.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Address and length of all slots, for registration with a device.
    pub fn region(&self) -> (*const u8, usize) {
        (self.base.as_ptr().cast_const(), self.slot_bytes * self.slots)
    }

    /// What the arena really is.
    pub fn stats(&self) -> ArenaStats {
        let (free, leaked) = self.unheld().map_or((0, 0), |it| (it.free.len(), it.leaked));
        ArenaStats {
            bytes: (self.slot_bytes * self.slots) as u64,
            slot_bytes: self.slot_bytes as u64,
            free_slots: free as u64,
            leaked_slots: leaked as u64,
            huge_page_bytes: self.huge_page_bytes,
            locked: self.locked,
        }
    }

    /// `None` in a forked child: there the memory is absent, and another thread's lock may never be released.
    fn unheld(&self) -> Option<MutexGuard<'_, Unheld>> {
        // Only pushed, popped and counted: whole even after a panic elsewhere.
        let lock = || self.unheld.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_ours().then(lock)
    }

    /// False in a forked child.
    fn is_ours(&self) -> bool {
        process::id() == self.owner_pid
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.is_ours() {
            // The child did not inherit the mapping; what lives at its address now belongs to somebody else.
            let _not_unmapped = ManuallyDrop::new(self.mapping.take());
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// One slot of an arena: exclusive, 4 KiB-aligned memory. Dropping it returns it to the arena.
///
/// In a forked child the memory is absent: there a slot is empty, and dropping it does nothing.
pub struct Slot {
    arena: Arc<Arena>,
    index: u32,
}

impl Slot {
    /// Its number in the arena.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The arena it belongs to.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Byte offset in the arena's region.
    pub fn offset(&self) -> usize {
        self.index as usize * self.arena.slot_bytes
    }

    /// Gives the memory up for good: nobody will hold it again. For buffers that a device may still write.
    pub fn leak(self) {
        // The arena must stay mapped as long as the device may write: its reference count is leaked with the slot.
        let leaked = ManuallyDrop::new(self);
        if let Some(mut unheld) = leaked.arena.unheld() {
            unheld.leaked += 1;
        }
    }

    /// Bytes that may be touched: none in a forked child.
    fn usable_bytes(&self) -> usize {
        if self.arena.is_ours() { self.arena.slot_bytes } else { 0 }
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `offset` is within the region, as `index` came from the free list.
        let start = unsafe { self.arena.base.add(self.offset()) };
        // SAFETY: this slot alone holds these bytes, and they were initialised (zeroed) by the mapping.
        unsafe { slice::from_raw_parts(start.as_ptr(), self.usable_bytes()) }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `offset` is within the region, as `index` came from the free list.
        let start = unsafe { self.arena.base.add(self.offset()) };
        // SAFETY: this slot alone holds these bytes, and `&mut self` makes this borrow the only one.
        unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.usable_bytes()) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(mut unheld) = self.arena.unheld() {
            unheld.free.push(self.index);
        }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}

/// Bytes on huge pages of the mappings that overlap `[start, start + bytes)`, from `/proc/self/smaps`; 0 if unreadable.
fn huge_page_bytes(start: usize, bytes: usize) -> u64 {
    let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else { return 0 };
    let mut inside = false;
    let mut total = 0;
    for line in smaps.lines() {
        if let Some(range) = mapping_range(line) {
            inside = range.0 < start + bytes && start < range.1;
        } else if let Some(rest) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            total += kib * 1024;
        }
    }
    total.min(bytes as u64)
}

/// The address range of a mapping's first line in smaps; `None` for the attribute lines.
fn mapping_range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}
