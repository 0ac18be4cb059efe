//! What an NVMe tier shall be.

use std::{path::PathBuf, time::Duration};

use kv_chunk::MAX_PAYLOAD_BYTES;

use crate::{IoMode, TierError};

/// Fewest bytes of a cap: below, the bookkeeping of a file system would eat it.
const CAPACITY_BYTES_MIN: u64 = 1 << 20;
/// Most segment files of a store: each is an open file.
pub(super) const SEGMENTS_MAX: usize = 4096;

/// Configuration of an [`NvmeTier`](crate::NvmeTier).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NvmeConfig {
    /// Name for reports.
    pub name: String,
    /// Where the files live; made (mode 0700) if absent. One process at a time.
    pub directory: PathBuf,
    /// The cap on everything in the directory, in bytes as `du` counts them.
    pub capacity_bytes: u64,
    /// Bytes of a segment file, rounded down to whole records, at least one. `None`: an eighth of the cap, at most
    /// 1 GiB, unless that made more than 512 files.
    pub segment_bytes: Option<u64>,
    /// Largest payload accepted.
    pub payload_bytes_max: u64,
    /// Ops in flight at most; further submits are refused.
    pub queue_ops_max: u32,
    /// Requests in flight at most.
    pub ring_entries: u32,
    /// Write requests in flight at most: fewer let reads through sooner.
    pub write_requests_max: u32,
    /// Bytes of one request; `None`: what the device takes whole.
    pub request_bytes_max: Option<u64>,
    /// Threads of the pool that does the I/O where io_uring is denied.
    pub threads: u32,
    /// What may be used. What is false here is not tried.
    pub allow: IoMode,
    /// Free space that the file system shall keep, in bytes, whoever else uses it: 0 for none. No segment is made below
    /// it, and segments are given up for it when something is written.
    pub min_free_bytes: u64,
    /// Once less of the slots of a size than this are free (in thousandths of them that are in use), and no segment more
    /// fits, chunks are dropped ahead of writes, a few a poll ...
    pub high_watermark_permille: u32,
    /// ... until so many are in use.
    pub low_watermark_permille: u32,
    /// Who moves the bytes.
    pub engine: IoEngine,
    /// For tools: nothing in the directory is mended, tidied or shrunk to the cap at open, and writes are refused.
    /// `remove` works.
    pub look_only: bool,
    /// For tools: the header of every slot is read at open, whatever the index files say. So does `look_only`.
    pub read_all_headers: bool,
    /// How long dropping the tier waits for what is in flight before it leaks it.
    pub drop_wait: Duration,
}

/// Who moves an NVMe tier's bytes. The files are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoEngine {
    /// The tier itself: io_uring, or threads where that is denied. No copies.
    #[default]
    Own,
    /// glommio, for comparison: one copy of every byte, no registration, no fallback. The kernel must allow io_uring,
    /// the file system O_DIRECT, and the memlock limit 512 KiB. Reads are sent whole, so `ring_entries` bounds reads.
    #[cfg(feature = "glommio")]
    Glommio,
}

impl NvmeConfig {
    /// Defaults for all but what has none.
    pub fn new(
        name: impl Into<String>,
        directory: impl Into<PathBuf>,
        capacity_bytes: u64,
    ) -> Self {
        Self {
            name: name.into(),
            directory: directory.into(),
            capacity_bytes,
            segment_bytes: None,
            payload_bytes_max: MAX_PAYLOAD_BYTES,
            queue_ops_max: 256,
            ring_entries: 256,
            write_requests_max: 32,
            request_bytes_max: None,
            threads: 8,
            allow: IoMode::ALL,
            min_free_bytes: 0,
            high_watermark_permille: 990,
            low_watermark_permille: 980,
            engine: IoEngine::Own,
            look_only: false,
            read_all_headers: false,
            drop_wait: Duration::from_secs(5),
        }
    }

    /// Fails on values that cannot work.
    pub(super) fn check(&self) -> Result<(), TierError> {
        let fail = |field, problem: String, fix: &str| {
            Err(TierError::Config { field, problem, fix: fix.to_owned() })
        };
        if self.capacity_bytes < CAPACITY_BYTES_MIN {
            let problem = format!("a cap of {} bytes holds nothing", self.capacity_bytes);
            return fail("capacity_bytes", problem, "give the tier at least 1 MiB");
        }
        if self.segment_bytes == Some(0) {
            return fail("segment_bytes", "0 bytes".into(), "leave it out for the default");
        }
        if self.capacity_bytes / self.segment_bytes() > SEGMENTS_MAX as u64 {
            let problem = format!("more than {SEGMENTS_MAX} segment files within the cap");
            return fail("segment_bytes", problem, "use larger segments");
        }
        let (low, high) = (self.low_watermark_permille, self.high_watermark_permille);
        if low > high || high > 1000 || low == 0 {
            let problem = format!("watermarks of {low} and {high} thousandths");
            return fail("low_watermark_permille", problem, "use 1 <= low <= high <= 1000");
        }
        if self.payload_bytes_max > MAX_PAYLOAD_BYTES {
            let problem = format!("a chunk holds at most {MAX_PAYLOAD_BYTES} bytes");
            return fail("payload_bytes_max", problem, "lower it");
        }
        for (field, value) in [
            ("queue_ops_max", self.queue_ops_max),
            ("ring_entries", self.ring_entries),
            ("write_requests_max", self.write_requests_max),
            ("threads", self.threads),
        ] {
            if !(1..=32_768).contains(&value) {
                return fail(field, format!("{value}"), "use 1 to 32768");
            }
        }
        if self.request_bytes_max.is_some_and(|bytes| bytes < 4096) {
            return fail("request_bytes_max", "under 4096 bytes".into(), "use 4096 or more");
        }
        Ok(())
    }

    /// Bytes of a segment file before rounding to whole records.
    pub(super) fn segment_bytes(&self) -> u64 {
        let default = (self.capacity_bytes / 8).min(1 << 30).max(self.capacity_bytes / 512);
        self.segment_bytes.unwrap_or(default).max(1)
    }
}
