//! Why an engine does not open.

use std::{io, path::PathBuf};

use kv_tiers::{ArenaError, TierError};
use thiserror::Error;

/// Why an engine does not open. Once it is open, nothing is an error: in doubt a chunk is a miss or a store is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A configuration value cannot be used.
    #[error("{field}: {problem}; {fix}")]
    Config {
        /// The field, such as `tier[1].capacity`.
        field: String,
        /// What is wrong with it.
        problem: String,
        /// What to write instead.
        fix: String,
    },
    /// The configuration file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// The memory for transfers cannot be had.
    #[error("no memory for {purpose}")]
    Arena {
        /// `reads` or `staging`.
        purpose: &'static str,
        /// Why.
        source: ArenaError,
    },
    /// A tier does not open.
    #[error("tier {name} does not open")]
    Tier {
        /// Its name.
        name: String,
        /// Why.
        source: TierError,
    },
    /// The system refused a thread, an eventfd or the socket.
    #[error("{what} cannot be made")]
    System {
        /// What was asked for.
        what: String,
        /// The system's words.
        source: io::Error,
    },
}

impl EngineError {
    pub(crate) fn config(
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::Config { field: field.into(), problem: problem.into(), fix: fix.into() }
    }

    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), source: source.into() }
    }
}
