//! `[queue]`: how loads of callers that do not wait are pooled.

use serde::Deserialize;

use crate::{ByteSize, EngineError};

const HOUR_MS: u64 = 3_600_000;

/// `[queue]`: loads of callers that do not wait, see [`LoadQueue`](crate::LoadQueue).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct QueueSection {
    /// Memory for chunks that were loaded and not taken yet; by default that of 64 chunks. It bounds what is pooled.
    pub memory: Option<ByteSize>,
    /// How long the first load of a pool waits for others while nothing is being read.
    pub gather_us: u64,
    /// What a submitted load has not got after this is a miss.
    pub deadline_ms: u64,
    /// How long a finished load is kept for its caller; then its memory is given to others.
    pub keep_ms: u64,
}

impl Default for QueueSection {
    fn default() -> Self {
        Self { memory: None, gather_us: 1_000, deadline_ms: 30_000, keep_ms: 5_000 }
    }
}

impl QueueSection {
    /// Chunks that memory is there for.
    pub(crate) fn slots(&self, chunk_bytes: ByteSize) -> usize {
        const SLOTS: usize = 64;
        let fit = |memory: ByteSize| usize::try_from(memory.0 / chunk_bytes.0.max(1));
        self.memory.map_or(SLOTS, |memory| fit(memory).unwrap_or(usize::MAX))
    }

    pub(super) fn check(&self, chunk_bytes: ByteSize) -> Result<(), EngineError> {
        let fail = |field: &str, problem: String, fix: String| {
            Err(EngineError::config(format!("queue.{field}"), problem, fix))
        };
        for (field, value) in [("deadline_ms", self.deadline_ms), ("keep_ms", self.keep_ms)] {
            if !(1..=HOUR_MS).contains(&value) {
                let fix = "write 1 ms to 1 hour (3600000)".to_owned();
                return fail(field, format!("{value} ms"), fix);
            }
        }
        if self.gather_us > 1_000_000 {
            let fix = "write 0 to 1000000".to_owned();
            return fail("gather_us", format!("{} us", self.gather_us), fix);
        }
        if self.slots(chunk_bytes) == 0 {
            let problem = format!("{} holds no chunk", self.memory.unwrap_or_default());
            return fail("memory", problem, format!("write at least {chunk_bytes}"));
        }
        Ok(())
    }
}
