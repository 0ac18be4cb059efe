//! Which chunk: namespace, rank, object group, chunk hash, cache salt.

use std::{fmt, sync::Arc};

use thiserror::Error;

use crate::{
    Digest, MAX_KEY_BYTES, Namespace,
    namespace::View,
    wire::{Reader, put},
};

/// Version of the canonical encoding: the first field of every key, so that keys of two encodings never coincide.
pub const KEY_VERSION: u32 = 1;

/// Why a key cannot be made or read.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum KeyError {
    /// A mandatory text of the namespace is blank.
    #[error("namespace field `{field}` is blank: name it, or write `none`")]
    Blank {
        /// Which.
        field: &'static str,
    },
    /// A size in the namespace is zero.
    #[error("namespace field `{field}` is 0: give at least 1")]
    Zero {
        /// Which.
        field: &'static str,
    },
    /// The chunk hash is shorter than 8 or longer than 64 bytes.
    #[error("chunk hash has {bytes} bytes, give 8 to 64")]
    HashLength {
        /// Its length.
        bytes: usize,
    },
    /// The canonical key is longer than a header holds.
    #[error(
        "canonical key has {bytes} bytes, at most {MAX_KEY_BYTES} fit: shorten the namespace or the salt"
    )]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Stored canonical bytes are of an encoding that this version does not know.
    #[error("stored key has encoding {version}, this reader knows {KEY_VERSION}")]
    Version {
        /// The encoding found.
        version: u32,
    },
    /// Stored canonical bytes do not parse.
    #[error("stored key is malformed at byte {offset}")]
    Malformed {
        /// Where.
        offset: usize,
    },
}

/// A validated namespace, encoded once: makes the keys of one model in one allocation each. Cheap to clone.
#[derive(Clone)]
pub struct KeySpace {
    prefix: Arc<[u8]>,
}

impl KeySpace {
    /// Validates and encodes `namespace`. Fails with the field to blame, or if it leaves no room for a chunk hash.
    pub fn new(namespace: &Namespace) -> Result<Self, KeyError> {
        let view = namespace.view();
        view.validate()?;
        let mut prefix = Vec::with_capacity(256);
        put(&mut prefix, &KEY_VERSION.to_le_bytes());
        view.encode(&mut prefix);
        let shortest = prefix.len() + SUFFIX_BYTES + HASH_BYTES_MIN;
        if shortest > MAX_KEY_BYTES {
            return Err(KeyError::TooLong { bytes: shortest });
        }
        Ok(Self { prefix: prefix.into() })
    }

    /// The key of the chunk whose tokens hash to `chunk_hash` (opaque, 8 to 64 bytes), for one parallel rank, one
    /// object group (layers that share a cache layout) and one tenant's `cache_salt` (may be empty).
    pub fn key(
        &self,
        kv_rank: u32,
        object_group: u32,
        chunk_hash: &[u8],
        cache_salt: &[u8],
    ) -> Result<ChunkKey, KeyError> {
        check_hash(chunk_hash)?;
        let bytes = self.prefix.len() + SUFFIX_BYTES + chunk_hash.len() + cache_salt.len();
        // The stack holds the key while it grows, so that the shared copy is the only allocation.
        let mut buffer = [0; MAX_KEY_BYTES];
        let mut rest = buffer.get_mut(..bytes).ok_or(KeyError::TooLong { bytes })?;
        append(&mut rest, &self.prefix);
        for field in [&kv_rank.to_le_bytes(), &object_group.to_le_bytes(), chunk_hash, cache_salt] {
            append(&mut rest, &u32::try_from(field.len()).expect("it fits a key").to_le_bytes());
            append(&mut rest, field);
        }
        let canonical = &buffer[..bytes];
        Ok(ChunkKey { digest: Digest::of(canonical), canonical: canonical.into() })
    }
}

impl fmt::Debug for KeySpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeySpace({})", Digest::of(&self.prefix))
    }
}

const HASH_BYTES_MIN: usize = 8;
const HASH_BYTES_MAX: usize = 64;
/// Length prefixes of the four fields behind the namespace, and the two numbers among them.
const SUFFIX_BYTES: usize = 4 * 4 + 2 * 4;

fn check_hash(chunk_hash: &[u8]) -> Result<(), KeyError> {
    let bytes = chunk_hash.len();
    if (HASH_BYTES_MIN..=HASH_BYTES_MAX).contains(&bytes) {
        Ok(())
    } else {
        Err(KeyError::HashLength { bytes })
    }
}

fn append(rest: &mut &mut [u8], bytes: &[u8]) {
    let (head, tail) = std::mem::take(rest).split_at_mut(bytes.len());
    head.copy_from_slice(bytes);
    *rest = tail;
}

/// The full identity of a chunk. Cheap to clone; equal exactly if the canonical bytes are.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ChunkKey {
    digest: Digest,
    canonical: Arc<[u8]>,
}

impl ChunkKey {
    /// One key, when no [`KeySpace`] is at hand: it encodes the whole namespace each time.
    pub fn new(
        namespace: &Namespace,
        kv_rank: u32,
        object_group: u32,
        chunk_hash: &[u8],
        cache_salt: &[u8],
    ) -> Result<Self, KeyError> {
        KeySpace::new(namespace)?.key(kv_rank, object_group, chunk_hash, cache_salt)
    }

    /// A key from stored canonical bytes; fails unless [`ChunkKey::new`] writes exactly these bytes.
    pub fn from_canonical(canonical: &[u8]) -> Result<Self, KeyError> {
        check_canonical(canonical)?;
        Ok(Self { digest: Digest::of(canonical), canonical: canonical.into() })
    }

    /// The bytes that are stored in a chunk and compared on every read.
    pub fn canonical(&self) -> &[u8] {
        &self.canonical
    }

    /// The index key.
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkKey({})", self.digest)
    }
}

/// A key taken apart, for tools that look inside.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyParts {
    /// Its namespace.
    pub namespace: Namespace,
    /// Parallel rank, as the engine numbers it (some pack world size and local rank into it).
    pub kv_rank: u32,
    /// Object group.
    pub object_group: u32,
    /// Chunk hash.
    pub chunk_hash: Vec<u8>,
    /// Tenant's cache salt.
    pub cache_salt: Vec<u8>,
}

impl KeyParts {
    /// Takes canonical bytes apart; anything that [`ChunkKey::new`] would not have written is an error.
    pub fn parse(canonical: &[u8]) -> Result<Self, KeyError> {
        let borrowed = Parts::parse(canonical)?;
        Ok(Self {
            namespace: borrowed.namespace.to_namespace(),
            kv_rank: borrowed.kv_rank,
            object_group: borrowed.object_group,
            chunk_hash: borrowed.chunk_hash.to_vec(),
            cache_salt: borrowed.cache_salt.to_vec(),
        })
    }
}

/// Fails unless these are the bytes of a key. Allocates only for a namespace with `extra` fields.
pub(crate) fn check_canonical(canonical: &[u8]) -> Result<(), KeyError> {
    Parts::parse(canonical).map(drop)
}

struct Parts<'a> {
    namespace: View<'a>,
    kv_rank: u32,
    object_group: u32,
    chunk_hash: &'a [u8],
    cache_salt: &'a [u8],
}

impl<'a> Parts<'a> {
    fn parse(canonical: &'a [u8]) -> Result<Self, KeyError> {
        if canonical.len() > MAX_KEY_BYTES {
            return Err(KeyError::TooLong { bytes: canonical.len() });
        }
        let mut reader = Reader::new(canonical);
        let version = reader.number()?;
        if version != KEY_VERSION {
            return Err(KeyError::Version { version });
        }
        let parts = Self {
            namespace: View::decode(&mut reader)?,
            kv_rank: reader.number()?,
            object_group: reader.number()?,
            chunk_hash: reader.field()?,
            cache_salt: reader.field()?,
        };
        reader.finish()?;
        check_hash(parts.chunk_hash)?;
        Ok(parts)
    }
}
