//! What a provider declares. Devices differ in exactly this, so nothing of it is assumed.

use crate::{Extent, FastTierError};

/// How data come into fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Staging {
    /// The device works on a request by itself.
    Async {
        /// It says when it is done. If not, `poll` never returns an event, and readiness is a matter of residency or of
        /// waiting.
        completion: bool,
    },
    /// A blocking call, which the provider makes on a thread of its own; it completes with an event.
    Blocking,
    /// There is no call: data come in when they are touched, and only then.
    TouchOnly,
}

/// What can be known about data in fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResidencyReport {
    /// Every granule's residency is known.
    Exact,
    /// Nothing is known.
    Unknown,
}

/// What keeps data in fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Protection {
    /// Protected data leave only when protection ends.
    Hard,
    /// The device tries.
    Advisory,
    /// There is no such call.
    None,
}

/// What makes written data durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Flush {
    /// Cache lines are written back and fenced; on Device-DAX fsync and msync are errors.
    CacheLines,
    /// A sync of the file behind the mapping.
    Fsync,
    /// Nothing has to be, or can be, done.
    None,
}

/// The declared capabilities of one provider; they do not change while it lives.
///
/// [`new`](Self::new) declares a device that can do nothing but be touched, which is legal; raise what is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Caps {
    /// Bytes of the arena.
    pub capacity_bytes: u64,
    /// Alignment of mappings, a power of two.
    pub map_align_bytes: u64,
    /// Offset and length of every extent are multiples of this power of two.
    pub stage_granule_bytes: u64,
    /// Bytes of fast memory, if known.
    pub fast_bytes: Option<u64>,
    /// Most bytes that can be protected at once, if known. 0 without protection.
    pub pin_limit_bytes: Option<u64>,
    /// Stagings that may be in flight; further ones are refused.
    pub queue_ops_max: usize,
    /// How data come in.
    pub staging: Staging,
    /// What can be known.
    pub residency: ResidencyReport,
    /// What keeps data there.
    pub protection: Protection,
    /// Whether `evict_hint` does anything.
    pub evict: bool,
    /// What makes writes durable.
    pub flush: Flush,
    /// NUMA node of the memory, if it has one.
    pub numa_node: Option<u32>,
}

impl Caps {
    /// Fails for the first extent that [`Extent::check`] refuses.
    pub(crate) fn check(&self, extents: &[Extent]) -> Result<(), FastTierError> {
        extents.iter().try_for_each(|extent| extent.check(self))
    }

    /// A device of `capacity_bytes` with granules of `stage_granule_bytes` that can only be touched.
    pub const fn new(capacity_bytes: u64, stage_granule_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            map_align_bytes: stage_granule_bytes,
            stage_granule_bytes,
            fast_bytes: None,
            pin_limit_bytes: Some(0),
            queue_ops_max: 0,
            staging: Staging::TouchOnly,
            residency: ResidencyReport::Unknown,
            protection: Protection::None,
            evict: false,
            flush: Flush::None,
            numa_node: None,
        }
    }

    /// Fails with the first declaration that contradicts itself.
    pub fn validate(&self) -> Result<(), FastTierError> {
        let wrong = |field, fix| Err(FastTierError::Caps { field, fix });
        if !self.stage_granule_bytes.is_power_of_two() {
            return wrong("stage_granule_bytes", "a power of two");
        }
        if !self.map_align_bytes.is_power_of_two() {
            return wrong("map_align_bytes", "a power of two");
        }
        if self.capacity_bytes == 0 || !self.capacity_bytes.is_multiple_of(self.stage_granule_bytes)
        {
            return wrong("capacity_bytes", "a multiple of stage_granule_bytes, at least one");
        }
        if self.protection == Protection::None && self.pin_limit_bytes != Some(0) {
            return wrong("pin_limit_bytes", "0, as there is no protection");
        }
        if self.fast_bytes.zip(self.pin_limit_bytes).is_some_and(|(fast, pin)| pin > fast) {
            return wrong("pin_limit_bytes", "no more than fast_bytes");
        }
        if self.staging != Staging::TouchOnly && self.queue_ops_max == 0 {
            return wrong("queue_ops_max", "at least 1, as it stages");
        }
        Ok(())
    }
}
