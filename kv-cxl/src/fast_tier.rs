//! The provider trait: one device with a fast memory in front of its media.

use std::fmt;

use crate::{Caps, Extent, FastTierError};

/// Names a staging; ids in flight at one time on one provider must differ. Without completion events they are in flight
/// for an unknown time, so do not reuse them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(pub u64);

impl fmt::Display for StageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The byte-addressable range of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaView {
    /// Length, as the device says (the length of a DAX file is 0 and must not be asked).
    pub bytes: u64,
    /// Where it is mapped in this process; `None` if there are no bytes to map (a simulation).
    pub base_address: Option<usize>,
}

/// How much of some extents is in fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// So many bytes.
    Bytes(u64),
    /// The device does not say.
    Unknown,
}

/// How a staging ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageEvent {
    /// The device is done with it. **Not** that the data are there: what was not protected may have left again.
    Done(StageId),
    /// It failed; some of it may be there.
    Failed(StageId, FastTierError),
}

/// How busy a provider is: the input of a time-until-ready estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Bytes submitted and still to be moved, if known.
    pub queued_bytes: Option<u64>,
    /// Aggregate effective staging rate, if known.
    pub bytes_per_s: Option<u64>,
}

/// One device. Thin and vendor neutral: it moves and protects extents of one arena, and knows no objects, reference
/// counts or budgets.
///
/// # Contract
///
/// * One thread owns a provider, and no call blocks on the device. `now_ns` is nanoseconds of one monotonic origin and
///   never goes back.
/// * Every extent consists of whole granules inside the arena ([`Extent::check`]); a call with one that does not is
///   refused as a whole and changes nothing.
/// * [`submit_stage`](Self::submit_stage) asks for what is absent; each accepted staging gives exactly one event from a
///   later [`poll`](Self::poll), unless the capabilities say that there are none. Bytes of one staging may be there
///   before it is done.
/// * [`protect`](Self::protect) is all or nothing, and may precede staging: absent granules are protected as they come
///   in. It **does not nest**: protecting twice is protecting once, and one [`unprotect`](Self::unprotect) ends it.
///   Whoever shares extents keeps the counts. Under [`Protection::Hard`](crate::Protection::Hard) what is protected and
///   there stays until then, and a protected granule that is staged without failure is there when its staging is done.
/// * Ending protection evicts nothing, and [`evict_hint`](Self::evict_hint) leaves protected granules alone.
/// * A provider that can do nothing but be touched is legal: its `submit_stage` and `protect` are refused as
///   [`Unsupported`](FastTierError::Unsupported), as its capabilities say beforehand.
pub trait FastTier: fmt::Debug + Send {
    /// What the device can do.
    fn caps(&self) -> &Caps;

    /// Where its bytes are.
    fn arena(&self) -> ArenaView;

    /// How many bytes of `extents` are in fast memory, as of the last poll.
    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError>;

    /// Asks for `extents` in fast memory.
    fn submit_stage(
        &mut self,
        id: StageId,
        extents: &[Extent],
        now_ns: u64,
    ) -> Result<(), FastTierError>;

    /// Makes progress and appends what ended to `events`. Returns when it wants to be called next; `None` if time alone
    /// brings nothing.
    fn poll(&mut self, now_ns: u64, events: &mut Vec<StageEvent>) -> Option<u64>;

    /// Protects `extents`: all of them, or none and [`NoCapacity`](FastTierError::NoCapacity).
    fn protect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError>;

    /// Ends the protection of `extents`; of what is not protected nothing changes.
    fn unprotect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError>;

    /// Says that `extents` will not be used soon. A device that takes no hints ignores it.
    fn evict_hint(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError>;

    /// Makes what was written to `extents` durable, as far as the device can.
    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError>;

    /// How busy it is.
    fn load(&self) -> Load;
}

const _: Option<&dyn FastTier> = None;
