//! Why an operation on a tier failed.

use std::{fmt, io, path::PathBuf};

use kv_chunk::Digest;
use thiserror::Error;

/// Where an I/O error happened: everything one needs to look at the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoContext {
    /// What was done (`read`, `write`, `open`, `fallocate`, ...).
    pub call: &'static str,
    /// File or directory; the tier's name where there is none.
    pub path: PathBuf,
    /// Byte offset.
    pub offset: u64,
    /// Byte length asked for.
    pub length: u64,
}

impl fmt::Display for IoContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, path, offset, length } = self;
        write!(f, "{call} of {length} bytes at offset {offset} of {}", path.display())
    }
}

/// Why an operation on a tier, or opening one, failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TierError {
    /// The tier does not hold this chunk.
    #[error("chunk {digest} is not held")]
    NotFound {
        /// Which chunk.
        digest: Digest,
    },
    /// A write of a chunk that is already readable here: nothing was written.
    #[error("chunk {digest} is already held")]
    AlreadyHeld {
        /// Which chunk.
        digest: Digest,
    },
    /// The system refused or failed an I/O.
    #[error("{context} failed (errno {errno})")]
    Io {
        /// Where.
        context: IoContext,
        /// The error number, positive; 0 if the system gave none.
        errno: i32,
        /// The system's words.
        source: io::Error,
    },
    /// Fewer bytes than asked for, and asking again brought none.
    #[error("{context}: only {done} bytes")]
    Short {
        /// Where.
        context: IoContext,
        /// Bytes transferred.
        done: u64,
    },
    /// No room within the cap, and nothing may be evicted now.
    #[error(
        "no room for {wanted_bytes} bytes within the cap of {capacity_bytes}: everything is in use"
    )]
    NoSpace {
        /// Asked for.
        wanted_bytes: u64,
        /// The cap.
        capacity_bytes: u64,
    },
    /// No room for chunks of this size: all space is in segments of other sizes, and each of them holds a chunk that is
    /// leased or in use.
    #[error(
        "no room for {wanted_bytes} bytes within the cap of {capacity_bytes}: each of {segments} segments of other sizes \
         holds a chunk that is leased or in use"
    )]
    AllLeased {
        /// Asked for.
        wanted_bytes: u64,
        /// The cap.
        capacity_bytes: u64,
        /// Segments there are.
        segments: u64,
    },
    /// The tier was closed or its medium is gone.
    #[error("tier {tier} is closed")]
    Closed {
        /// Its name.
        tier: String,
    },
    /// A configuration value cannot be used.
    #[error("{field}: {problem}; {fix}")]
    Config {
        /// The field.
        field: &'static str,
        /// What is wrong.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// Another process holds the directory.
    #[error("{path} is in use by another process (pid {pid}): give each engine its own directory", path = .path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
        /// Its holder, 0 if unknown.
        pid: u32,
    },
    /// A later version made what stands there: nothing was changed.
    #[error("{path} is of version {found}, this program knows {known}: use a later one or another directory", path = .path.display())]
    Newer {
        /// The file that says so.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The latest version known here.
        known: u32,
    },
}

/// What kind of failure, for counters and the breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Not held.
    NotFound,
    /// Already held.
    AlreadyHeld,
    /// An errno other than the ones below: the device is suspect.
    Io,
    /// Short transfer.
    Short,
    /// No room (the cap, ENOSPC, EDQUOT): writes stop, reads go on.
    NoSpace,
    /// Closed.
    Closed,
    /// Configuration.
    Config,
}

impl TierError {
    /// An I/O error with its place.
    pub fn io(context: IoContext, source: io::Error) -> Self {
        Self::Io { errno: source.raw_os_error().unwrap_or(0), context, source }
    }

    /// Its kind.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::AlreadyHeld { .. } => ErrorKind::AlreadyHeld,
            Self::Io { errno, .. } if [libc::ENOSPC, libc::EDQUOT].contains(errno) => {
                ErrorKind::NoSpace
            }
            Self::Io { .. } => ErrorKind::Io,
            Self::Short { .. } => ErrorKind::Short,
            Self::NoSpace { .. } | Self::AllLeased { .. } => ErrorKind::NoSpace,
            Self::Closed { .. } => ErrorKind::Closed,
            Self::Config { .. } | Self::Locked { .. } | Self::Newer { .. } => ErrorKind::Config,
        }
    }
}
