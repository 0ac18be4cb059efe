//! What calls other than loads answer.

use serde::Serialize;

/// What became of a chunk offered to [`Engine::store`](crate::Engine::store).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Copied and readable from now on; written later.
    Staged,
    /// A tier holds it or it is staged: nothing was done.
    AlreadyHeld,
    /// Not kept; the caller goes on without it.
    Refused(StoreRefusal),
}

/// Why a chunk was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StoreRefusal {
    /// Staging is full and nothing in it can be given up.
    StagingFull,
    /// The write queue of every tier is full.
    QueueFull,
    /// Larger than `chunk_bytes_max`.
    TooLarge,
    /// No tier takes writes.
    NoTier,
    /// The engine is closed, or this process is a fork of the one that opened it.
    Closed,
}

/// How a flush ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FlushReport {
    /// Nothing is staged any more.
    pub drained: bool,
    /// Chunks still staged.
    pub pending: u64,
}

/// How closing ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CloseReport {
    /// Nothing staged was left unwritten.
    pub drained: bool,
    /// Staged chunks that were given up.
    pub abandoned_chunks: u64,
    /// Tier threads that did not end in time: their memory and files are left to them.
    pub leaked_threads: u64,
}
