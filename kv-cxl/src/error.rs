//! Why a provider refuses or fails.

use std::{io, path::PathBuf};

use kv_tiers::{IoContext, TierError};
use thiserror::Error;

use crate::{Extent, StageId};

/// Why a call was refused, or a staging failed. A refused call changed nothing.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FastTierError {
    /// A declaration or setting contradicts itself.
    #[error("`{field}` must be {fix}")]
    Caps {
        /// Which.
        field: &'static str,
        /// What it must be.
        fix: &'static str,
    },
    /// The extent is empty or ends behind the arena.
    #[error("extent {extent} does not lie in the arena of {capacity_bytes} bytes")]
    OutOfArena {
        /// The extent.
        extent: Extent,
        /// Bytes of the arena.
        capacity_bytes: u64,
    },
    /// The extent does not consist of whole granules.
    #[error("extent {extent} does not consist of granules of {granule_bytes} bytes")]
    Misaligned {
        /// The extent.
        extent: Extent,
        /// Bytes of a granule.
        granule_bytes: u64,
    },
    /// So many bytes cannot be protected now. None of them is.
    #[error("{asked_bytes} more bytes cannot be protected, {free_bytes} are free")]
    NoCapacity {
        /// Bytes that were not protected yet.
        asked_bytes: u64,
        /// Bytes that could have been.
        free_bytes: u64,
    },
    /// The device has no such call; its capabilities say so.
    #[error("the device cannot {call}")]
    Unsupported {
        /// Which.
        call: &'static str,
    },
    /// As many stagings as `queue_ops_max` allows are in flight.
    #[error("{queue_ops_max} stagings are in flight: poll, then submit again")]
    QueueFull {
        /// The bound.
        queue_ops_max: usize,
    },
    /// A staging of this name is in flight.
    #[error("staging {id} is in flight already: ids in flight must differ")]
    DuplicateId {
        /// The name.
        id: StageId,
    },
    /// The device failed.
    #[error("device error {errno} at extent {extent}")]
    Device {
        /// Errno.
        errno: i32,
        /// Where.
        extent: Extent,
    },
    /// The system refused or failed a call.
    #[error("{context} failed (errno {errno}: {})", io::Error::from_raw_os_error(*.errno))]
    Io {
        /// Where.
        context: IoContext,
        /// Errno.
        errno: i32,
    },
    /// The device, or the way it is set up, cannot be used.
    #[error("{path}: {problem}; {fix}", path = .path.display())]
    Setup {
        /// The device.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// The thread that stages has ended.
    #[error("the staging thread has ended: open the provider again")]
    Stopped,
}

impl FastTierError {
    pub(crate) fn io(context: IoContext, source: &io::Error) -> Self {
        Self::Io { context, errno: source.raw_os_error().unwrap_or(0) }
    }
}

impl From<FastTierError> for TierError {
    fn from(error: FastTierError) -> Self {
        match error {
            FastTierError::Io { context, errno } => {
                Self::io(context, io::Error::from_raw_os_error(errno))
            }
            FastTierError::Setup { path, problem, fix } => Self::Config {
                field: "path",
                problem: format!("{}: {problem}", path.display()),
                fix,
            },
            other => Self::Config {
                field: "device",
                problem: other.to_string(),
                fix: "see the device's capabilities".into(),
            },
        }
    }
}
