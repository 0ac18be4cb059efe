//! Names in the directory; `docs/shared.md` lists them.

use std::path::{Path, PathBuf};

use kv_chunk::Digest;

/// Says whose directory it is and which version wrote it.
pub(super) const MARKER: &str = "KVBSHARE";
/// Who counts and collects.
pub(super) const LEASE: &str = "KVBLEASE";
const CHUNK_SUFFIX: &str = ".kvc";
const TEMPORARY_SUFFIX: &str = ".tmp";

/// One of 4096 directories that chunks are spread over, by the first 12 bits of their digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Fan(u16);

impl Fan {
    pub(super) fn of(digest: Digest) -> Self {
        let [first, second, ..] = digest.to_bytes();
        Self(u16::from(first) << 4 | u16::from(second) >> 4)
    }

    fn parse(name: &str) -> Option<Self> {
        let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_ours = name.len() == 3 && name.bytes().all(lower);
        is_ours.then(|| u16::from_str_radix(name, 16).ok().map(Self))?
    }

    pub(super) fn path(self, root: &Path) -> PathBuf {
        root.join(format!("{:03x}", self.0))
    }

    /// The fan-out directories among the names of the root.
    pub(super) fn from_file_name(name: &std::ffi::OsStr) -> Option<Self> {
        Self::parse(name.to_str()?)
    }
}

pub(super) fn chunk_path(root: &Path, digest: Digest) -> PathBuf {
    Fan::of(digest).path(root).join(format!("{digest}{CHUNK_SUFFIX}"))
}

/// Beside its chunk, so that publishing never crosses a directory; another name for every attempt of everybody.
pub(super) fn temporary_path(root: &Path, digest: Digest, node: u64, attempt: u64) -> PathBuf {
    let name = format!(".{digest}.{node:016x}-{attempt:x}{TEMPORARY_SUFFIX}");
    Fan::of(digest).path(root).join(name)
}

/// A temporary in the root itself, for what is not a chunk.
pub(super) fn root_temporary(root: &Path, what: &str, node: u64) -> PathBuf {
    root.join(format!(".{what}.{node:016x}{TEMPORARY_SUFFIX}"))
}

/// What a file in a fan-out directory is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    Chunk(Digest),
    Temporary,
    /// Not ours.
    Other,
}

pub(super) fn named(fan: Fan, name: &str) -> Named {
    if let Some(digest) = name.strip_suffix(CHUNK_SUFFIX).and_then(digest_from_hex) {
        return if Fan::of(digest) == fan { Named::Chunk(digest) } else { Named::Other };
    }
    if is_temporary(name) { Named::Temporary } else { Named::Other }
}

/// Temporaries begin with a dot and end with `.tmp`.
pub(super) fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(TEMPORARY_SUFFIX)
}

fn digest_from_hex(hex: &str) -> Option<Digest> {
    if hex.len() != 32 || hex.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    // `+f` is a number to the parser, and no name of ours.
    let digest = Digest::from_bytes(bytes);
    (digest.to_string() == hex).then_some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_found_under_its_own_name_only() {
        let digest = Digest::from_bytes([0xab; 16]);
        let path = chunk_path(Path::new("r"), digest);
        assert_eq!(path, Path::new("r/aba/abababababababababababababababab.kvc"));
        let fan = Fan::of(digest);
        assert_eq!(named(fan, path.file_name().unwrap().to_str().unwrap()), Named::Chunk(digest));
        let elsewhere = Fan::of(Digest::from_bytes([0; 16]));
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(named(elsewhere, name), Named::Other);
        assert_eq!(named(fan, &name.to_uppercase()), Named::Other);
        assert_eq!(named(fan, "+babababababababababababababababab.kvc"), Named::Other);
    }

    #[test]
    fn temporaries_differ_by_node_and_attempt_and_are_known() {
        let digest = Digest::from_bytes([1; 16]);
        let name = |node, attempt| {
            let path = temporary_path(Path::new("r"), digest, node, attempt);
            path.file_name().unwrap().to_str().unwrap().to_owned()
        };
        assert_ne!(name(1, 1), name(1, 2));
        assert_ne!(name(1, 1), name(2, 1));
        assert_eq!(named(Fan::of(digest), &name(1, 1)), Named::Temporary);
    }

    #[test]
    fn only_three_small_hexadecimal_digits_are_a_fan_out_directory() {
        let is_fan = |name: &str| Fan::from_file_name(name.as_ref()).is_some();
        assert!(is_fan("0af") && is_fan("fff"));
        assert!(!is_fan("0AF") && !is_fan("+af") && !is_fan("0aff") && !is_fan("xyz"));
    }
}
