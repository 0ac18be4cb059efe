//! Tiers of kind flash: chunks on a file or device, and claims that have them staged in its fast memory.

use std::{sync::Arc, thread::JoinHandle};

use kv_cxl::{FastTier, Places};
use kv_tiers::Tier;

use crate::{EngineError, TierConfig, directory::Directory};

mod books;
mod desk;
mod open;
mod plan;
mod ready;
mod retrieving;
mod schedule;
mod status;
mod uses;
mod worker;

pub(crate) use self::{
    desk::Desk,
    open::{open, open_to_look},
    retrieving::Retrieving,
};
pub use self::{
    schedule::{RequestWork, Schedule},
    status::ClaimStatus,
};

/// A tier made by the caller. What stages claims on it comes with it, where there is such a thing.
#[derive(Debug)]
pub struct TierParts {
    /// The tier.
    pub tier: Box<dyn Tier>,
    /// Of a tier of kind flash.
    pub flash: Option<FlashParts>,
}

/// The fast memory in front of a tier of kind flash, and where the tier's chunks are in it.
#[derive(Debug)]
pub struct FlashParts {
    /// Stages and protects.
    pub memory: Box<dyn FastTier>,
    /// Of the [`DaxTier`](kv_cxl::DaxTier) on the same memory.
    pub places: Places,
}

impl From<Box<dyn Tier>> for TierParts {
    fn from(tier: Box<dyn Tier>) -> Self {
        Self { tier, flash: None }
    }
}

impl FlashParts {
    /// The books of claims on the tier that `config` describes; none where the memory cannot be asked to stage.
    pub(crate) fn desk(&self, config: &TierConfig) -> Option<Arc<Desk>> {
        let section = config.flash.clone().unwrap_or_default();
        let desk = || Desk::new(section, config.capacity.unwrap_or_default(), self.places.clone());
        worker::can_stage(&*self.memory).then(|| Arc::new(desk()))
    }

    /// Starts the thread that stages what they say. It ends after they were closed.
    pub(crate) fn spawn(
        self,
        desk: &Arc<Desk>,
        directory: &Arc<Directory>,
        tier: u8,
    ) -> Result<JoinHandle<()>, EngineError> {
        worker::spawn(self.memory, desk, directory, tier)
    }
}
