//! SSD-backed memory as a fast tier in front of flash: what such a device can do, and how to ask it to.
//!
//! *Is*: [`FastTier`], a thin and vendor-neutral provider trait with declared capabilities ([`Caps`]), because devices
//! differ in exactly what they can be asked; [`Simulated`], a device in virtual time; [`Blind`], which hides from its
//! user what some devices cannot tell; and [`TierTimeToReady`], which feeds `kv-staging` from any provider.
//!
//! *Is not*: a policy (that is `kv-staging`), a clock, or threads. Time is an argument. Real devices are not here yet.
//!
//! ```
//! use kv_cxl::{Extent, FastTier, Residency, Simulated, SimulatedConfig, StageEvent, StageId};
//!
//! // 64 MiB of flash behind 8 MiB of fast memory, staged at 1 GiB/s.
//! let mut device = Simulated::new(SimulatedConfig::new(64 << 20, 8 << 20, 1 << 30))?;
//! let prefix = [Extent { offset: 4 << 20, bytes: 4 << 20 }];
//!
//! // Reserve and protect first, then stage, then verify.
//! device.protect(&prefix, 0)?;
//! device.submit_stage(StageId(1), &prefix, 0)?;
//! let (mut events, mut now_ns) = (Vec::new(), 0);
//! while let Some(wake_ns) = device.poll(now_ns, &mut events) {
//!     now_ns = wake_ns;
//! }
//! assert_eq!(now_ns, 4_000_000_000 / 1024); // 4 MiB at 1 GiB/s
//! assert_eq!(events, [StageEvent::Done(StageId(1))]);
//! assert_eq!(device.residency(&prefix)?, Residency::Bytes(4 << 20));
//! # Ok::<(), kv_cxl::FastTierError>(())
//! ```

#![forbid(unsafe_code)]

mod blind;
mod caps;
mod error;
mod extent;
mod fast_tier;
mod simulated;
mod time_to_ready;

pub use crate::{
    blind::Blind,
    caps::{Caps, Flush, Protection, ResidencyReport, Staging},
    error::FastTierError,
    extent::{Extent, coalesce, total_bytes},
    fast_tier::{ArenaView, FastTier, Load, Residency, StageEvent, StageId},
    simulated::{Simulated, SimulatedConfig},
    time_to_ready::TierTimeToReady,
};
