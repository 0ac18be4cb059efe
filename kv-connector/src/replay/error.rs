//! Why a replay does not run to its end.

use std::{io, path::PathBuf};

use thiserror::Error;

use crate::{EngineError, replay::TraceError};

/// Why a replay does not run to its end. Misses, refused stores and wrong bytes are results, not errors.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The engine does not open.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An option has an impossible value.
    #[error("{option}: {problem}; {fix}")]
    Option {
        /// Its name on the command line.
        option: &'static str,
        /// What is wrong.
        problem: String,
        /// What to give instead.
        fix: String,
    },
    /// A directory for the run cannot be made.
    #[error("cannot make the directory {}", path.display())]
    Scratch {
        /// Which.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// A tier delivered nothing when its rate was measured.
    #[error(
        "tier {name} delivered {delivered} of {wanted} chunks when its rate was measured alone"
    )]
    Alone {
        /// Its name.
        name: String,
        /// Chunks delivered.
        delivered: u64,
        /// Chunks asked for.
        wanted: u64,
    },
    /// The caller asked to stop.
    #[error("stopped before the end")]
    Stopped,
}

impl ReplayError {
    /// Whether the caller's input is at fault, not the run.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Trace(_) | Self::Option { .. } => true,
            Self::Engine(error) => {
                matches!(error, EngineError::Config { .. } | EngineError::Read { .. })
            }
            _ => false,
        }
    }
}
