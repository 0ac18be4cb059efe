//! What a shared tier shall be.

use std::{path::PathBuf, time::Duration};

use kv_chunk::MAX_PAYLOAD_BYTES;

use crate::TierError;

const CAPACITY_BYTES_MIN: u64 = 1 << 20;

/// Configuration of a [`SharedTier`](crate::SharedTier).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedConfig {
    /// Name for reports.
    pub name: String,
    /// The directory, the same on every node that mounts it; made if absent.
    pub directory: PathBuf,
    /// The cap on all chunks in the directory, whoever wrote them. Give every node the same.
    pub capacity_bytes: u64,
    /// Writes stop, and chunks are dropped, while the file system has less than this free. 0: no floor.
    pub min_free_bytes: u64,
    /// Largest payload accepted.
    pub payload_bytes_max: u64,
    /// Ops in flight at most; further submits are refused.
    pub queue_ops_max: u32,
    /// Threads that read and write: as many system calls can hang before everything is refused.
    pub threads: u32,
    /// Threads that look for chunks, remove and count them.
    pub lookup_threads: u32,
    /// Who this is: random, another number for each opening of the directory by anybody.
    pub node: u64,
    /// What the opening is for.
    pub open_as: OpenAs,
    /// Permissions, independent of the process' umask. KV reveals prompts: widen with care.
    pub modes: Modes,
    /// A way to publish instead of the first that works.
    pub publish: Option<PublishBy>,
    /// A system call that takes longer counts as hung.
    pub op_timeout_ns: u64,
    /// The same for look-ups: while all of their threads hang this long, they answer "absent" at once.
    pub lookup_timeout_ns: u64,
    /// How long "absent" is remembered; at least 1 ms.
    pub absent_ttl_ns: u64,
    /// How many absent chunks are remembered.
    pub absent_max: usize,
    /// How many present chunks are remembered; those least recently met are forgotten, not deleted.
    pub index_chunks_max: usize,
    /// A chunk in use tells the other nodes so this often (its modification time is set).
    pub touch_every_ns: u64,
    /// A leader that is not heard for so long is replaced.
    pub lease_ttl: Duration,
    /// The leader counts the directory this often; rounded to quarters of `lease_ttl`.
    pub count_every: Duration,
    /// Temporaries that stay so long are of dead writers, and are removed by the leader.
    pub stale_after: Duration,
    /// How long opening may take.
    pub open_wait: Duration,
    /// How long dropping the tier waits for what is in flight before it leaks it.
    pub drop_wait: Duration,
}

/// What a directory is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenAs {
    /// To store and to read, as one node of many.
    #[default]
    Node,
    /// For tools, also beside nodes that run: nothing is made, written, touched or taken, no lease, no collecting. All
    /// that is there is looked at while it opens; writes are refused, [`remove`](crate::Tier::remove) works.
    Looker,
    /// As `Looker`, and what is provably no whole chunk, or no lease, is removed while it opens.
    Mender,
}

/// Permissions of what is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Of directories.
    pub directory: u32,
    /// Of files.
    pub file: u32,
    /// Bits taken from both.
    pub umask: u32,
}

impl Modes {
    pub(super) fn for_directory(self) -> u32 {
        self.directory & !self.umask & 0o7777
    }

    pub(super) fn for_file(self) -> u32 {
        self.file & !self.umask & 0o666
    }
}

impl Default for Modes {
    /// 0700 and 0600.
    fn default() -> Self {
        Self { directory: 0o700, file: 0o600, umask: 0 }
    }
}

/// How a complete temporary file becomes a chunk, safest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishBy {
    /// `link(2)`: the first writer wins.
    Link,
    /// `renameat2(2)` with `RENAME_NOREPLACE`: the first writer wins.
    RenameNoReplace,
    /// A look, then `rename(2)`: of writers within one moment the last wins. Readers still see one whole chunk.
    Rename,
}

impl SharedConfig {
    /// Defaults for all but what has none.
    pub fn new(
        name: impl Into<String>,
        directory: impl Into<PathBuf>,
        capacity_bytes: u64,
        node: u64,
    ) -> Self {
        Self {
            name: name.into(),
            directory: directory.into(),
            capacity_bytes,
            min_free_bytes: 0,
            payload_bytes_max: MAX_PAYLOAD_BYTES,
            queue_ops_max: 256,
            threads: 8,
            lookup_threads: 4,
            node,
            open_as: OpenAs::default(),
            modes: Modes::default(),
            publish: None,
            op_timeout_ns: 10_000_000_000,
            lookup_timeout_ns: 1_000_000_000,
            absent_ttl_ns: 2_000_000_000,
            absent_max: 1 << 16,
            index_chunks_max: 4 << 20,
            touch_every_ns: 3_600_000_000_000,
            lease_ttl: Duration::from_secs(20),
            count_every: Duration::from_secs(600),
            stale_after: Duration::from_secs(3600),
            open_wait: Duration::from_secs(10),
            drop_wait: Duration::from_secs(5),
        }
    }

    /// How often the keeper looks at the lease.
    pub(super) fn beat(&self) -> Duration {
        self.lease_ttl / 4
    }

    /// How many beats fit into `time`, at least one.
    pub(super) fn beats_in(&self, time: Duration) -> u64 {
        let beats = time.as_millis() / self.beat().as_millis().max(1);
        u64::try_from(beats).unwrap_or(u64::MAX).max(1)
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
        if self.payload_bytes_max > MAX_PAYLOAD_BYTES {
            let problem = format!("a chunk holds at most {MAX_PAYLOAD_BYTES} bytes");
            return fail("payload_bytes_max", problem, "lower it");
        }
        if self.node == 0 {
            return fail("node", "0 stands for nobody".into(), "use a random number");
        }
        for (field, value, most) in [
            ("queue_ops_max", self.queue_ops_max, 32_768),
            ("threads", self.threads, 256),
            ("lookup_threads", self.lookup_threads, 256),
        ] {
            if !(1..=most).contains(&value) {
                return fail(field, format!("{value}"), &format!("use 1 to {most}"));
            }
        }
        if self.modes.for_directory() & 0o300 != 0o300 || self.modes.for_file() & 0o600 != 0o600 {
            let problem = "the owner could not read and write what is made".into();
            return fail("modes", problem, "leave the owner's bits: 0700 and 0600");
        }
        if self.lease_ttl < Duration::from_millis(40) {
            return fail("lease_ttl", format!("{:?}", self.lease_ttl), "use 40 ms or more");
        }
        if self.absent_max == 0 || self.index_chunks_max == 0 {
            return fail("index_chunks_max", "nothing could be remembered".into(), "use 1 or more");
        }
        Ok(())
    }
}
