//! SSD-backed memory as a fast tier in front of flash: what such a device can do, how to ask it to, and chunks on it.
//!
//! *Is*: [`FastTier`], a thin and vendor-neutral provider trait with declared capabilities ([`Caps`]), because devices
//! differ in exactly what they can be asked; its providers [`DeviceDax`], [`PageCacheFlash`] and [`Simulated`] (virtual
//! time), and [`Blind`], which hides from its user what some devices cannot tell; [`DaxTier`], chunks on such memory as a
//! `kv-tiers` tier that survives crashes; and [`TierTimeToReady`], which feeds `kv-staging` from any provider.
//!
//! *Is not*: a policy (that is `kv-staging`) or a clock: time is an argument.
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

#![deny(unsafe_code)]

mod blind;
mod caps;
mod copy;
mod device_dax;
mod error;
mod extent;
mod fast_tier;
mod granules;
#[expect(unsafe_code, reason = "maps device memory")]
mod map;
mod media;
mod page_cache;
mod places;
mod readers;
mod recover;
mod register;
mod simulated;
mod space;
mod stager;
mod tier;
mod time_to_ready;

pub use crate::{
    blind::Blind,
    caps::{Caps, Flush, Protection, ResidencyReport, Staging},
    device_dax::{DaxInfo, DaxMedium, DeviceDax, DeviceDaxConfig},
    error::FastTierError,
    extent::{Extent, coalesce, total_bytes},
    fast_tier::{ArenaView, FastTier, Load, Residency, StageEvent, StageId},
    granules::GranuleCounts,
    media::{MEDIA_VERSION, Medium, MediumReader},
    page_cache::{FileMedium, PageCacheConfig, PageCacheFlash, Pinning},
    places::Places,
    register::{DmaPiece, RegisterError, Registration},
    simulated::{Simulated, SimulatedConfig},
    tier::{DaxFindings, DaxTier, DaxTierConfig, Format, Place},
    time_to_ready::TierTimeToReady,
};
