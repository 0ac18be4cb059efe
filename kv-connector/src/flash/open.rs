//! From a configuration to a tier of kind flash.

use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use kv_cxl::{
    DaxFindings, DaxTier, DaxTierConfig, DeviceDax, DeviceDaxConfig, FastTier, Medium,
    PageCacheConfig, PageCacheFlash,
};
use kv_tiers::{Tier, TierError};

use super::{FlashParts, TierParts};
use crate::{EngineConfig, TierConfig};

/// Chunks begin at multiples of this, and it is what is staged and protected: no two chunks share one. It stands on the
/// medium by its effect, so it stays.
const GRANULE_BYTES: u64 = 64 << 10;
/// A poll copies so much and lets the tier's thread look at everything else.
const POLL_BYTES: usize = 1 << 20;
/// An entry of the store's table for so many bytes, or for a sixteenth of the largest chunk.
const ENTRY_BYTES_MIN: u64 = 64 << 10;

/// Opens, or makes, the store and the memory in front of it.
pub(crate) fn open(
    tier: &TierConfig,
    engine: &EngineConfig,
    queue_ops_max: u32,
) -> Result<TierParts, TierError> {
    let path = path(tier);
    let (memory, medium) = memory(tier, &path, false)?;
    let mut config = DaxTierConfig::new(&tier.name);
    config.payload_bytes_max = engine.chunk_bytes_max.0;
    config.queue_ops_max = queue_ops_max;
    config.place_align_bytes = GRANULE_BYTES;
    config.poll_bytes_max = POLL_BYTES;
    let read_threads = tier.flash.clone().unwrap_or_default().read_threads;
    config.read_threads = read_threads.min(queue_ops_max as usize);
    let each = (engine.chunk_bytes_max.0 / 16).max(ENTRY_BYTES_MIN);
    config.entries = Some(u32::try_from(medium.bytes() / each).unwrap_or(u32::MAX).max(1));
    let store = DaxTier::open(config, medium)?;
    let flash = FlashParts { memory, places: store.places() };
    Ok(TierParts { tier: Box::new(store), flash: Some(flash) })
}

/// Opens what is there for a tool; nothing on it changes but for what the tool removes.
pub(crate) fn open_to_look(tier: &TierConfig) -> Result<(Box<dyn Tier>, DaxFindings), TierError> {
    let (_, medium) = memory(tier, &path(tier), true)?;
    let mut config = DaxTierConfig::new(&tier.name);
    config.place_align_bytes = GRANULE_BYTES;
    config.look_only = true;
    let store = DaxTier::open(config, medium)?;
    let findings = store.findings();
    Ok((Box::new(store), findings))
}

fn path(tier: &TierConfig) -> PathBuf {
    tier.path.clone().unwrap_or_default()
}

type Memory = (Box<dyn FastTier>, Box<dyn Medium>);

fn memory(tier: &TierConfig, path: &Path, look_only: bool) -> Result<Memory, TierError> {
    let capacity = tier.capacity.unwrap_or_default();
    let bytes = (!look_only).then_some(capacity.0 / GRANULE_BYTES * GRANULE_BYTES);
    let is_device = fs::metadata(path).is_ok_and(|it| it.file_type().is_char_device());
    if is_device {
        let mut config = DeviceDaxConfig::new(path);
        config.bytes = bytes;
        let device = DeviceDax::open(&config)?;
        let medium = device.medium();
        return Ok((Box::new(device), Box::new(medium)));
    }
    let protected_bytes = tier.flash.clone().unwrap_or_default().protected_bytes(capacity);
    let mut config = PageCacheConfig::new(path, protected_bytes);
    (config.bytes, config.granule_bytes) = (bytes, GRANULE_BYTES);
    config.piece_bytes = 4 << 20;
    let file = PageCacheFlash::open(config)?;
    let medium = file.medium();
    Ok((Box::new(file), Box::new(medium)))
}
