//! Settings that only a tier of many nodes has.

use serde::Deserialize;

use crate::ByteSize;

/// `[tier.shared]`: what only a tier of many nodes has. Give every node the same.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct SharedSection {
    /// Permissions of directories, in octal, whatever the umask of the process.
    pub directory_mode: String,
    /// Permissions of files, in octal.
    pub file_mode: String,
    /// Writes stop while the file system has less than this free.
    pub min_free: ByteSize,
    /// How long "absent" is remembered.
    pub absent_ttl_ms: u64,
    /// A system call that takes longer counts as hung.
    pub hung_after_ms: u64,
    /// A leader that is not heard for so long is replaced.
    pub lease_ttl_ms: u64,
    /// How often the leader counts the directory.
    pub count_every_ms: u64,
}

impl Default for SharedSection {
    fn default() -> Self {
        Self {
            directory_mode: "0700".to_owned(),
            file_mode: "0600".to_owned(),
            min_free: ByteSize(0),
            absent_ttl_ms: 2_000,
            hung_after_ms: 10_000,
            lease_ttl_ms: 20_000,
            count_every_ms: 600_000,
        }
    }
}

impl SharedSection {
    /// The number that an octal mode stands for.
    pub(crate) fn mode(text: &str) -> Option<u32> {
        u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777)
    }
}
