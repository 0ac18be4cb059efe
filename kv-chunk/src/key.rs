//! Which chunk: namespace, rank, object group, chunk hash, cache salt.

use std::{collections::BTreeMap, fmt, sync::Arc};

use thiserror::Error;

use crate::{Digest, MAX_KEY_BYTES, Namespace, namespace::put};

/// Why a key cannot be made or read.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum KeyError {
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
    /// Stored canonical bytes do not parse.
    #[error("stored key is malformed at byte {offset}")]
    Malformed {
        /// Where.
        offset: usize,
    },
}

/// The full identity of a chunk. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ChunkKey {
    canonical: Arc<[u8]>,
    digest: Digest,
}

impl ChunkKey {
    /// The key of the chunk whose tokens hash to `chunk_hash` (opaque, 8 to 64 bytes) in `namespace`, for one
    /// parallel rank, one object group (layers that share a cache layout) and one tenant's `cache_salt` (may be empty).
    pub fn new(
        namespace: &Namespace,
        kv_rank: u32,
        object_group: u32,
        chunk_hash: &[u8],
        cache_salt: &[u8],
    ) -> Result<Self, KeyError> {
        if !(8..=64).contains(&chunk_hash.len()) {
            return Err(KeyError::HashLength { bytes: chunk_hash.len() });
        }
        let mut canonical = Vec::with_capacity(512);
        namespace.encode(&mut canonical);
        put(&mut canonical, &kv_rank.to_le_bytes());
        put(&mut canonical, &object_group.to_le_bytes());
        put(&mut canonical, chunk_hash);
        put(&mut canonical, cache_salt);
        if canonical.len() > MAX_KEY_BYTES {
            return Err(KeyError::TooLong { bytes: canonical.len() });
        }
        Ok(Self { digest: Digest::of(&canonical), canonical: canonical.into() })
    }

    /// A key from stored canonical bytes.
    pub fn from_canonical(canonical: &[u8]) -> Result<Self, KeyError> {
        KeyParts::parse(canonical)?;
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
    /// Parallel rank.
    pub kv_rank: u32,
    /// Object group.
    pub object_group: u32,
    /// Chunk hash.
    pub chunk_hash: Vec<u8>,
    /// Tenant's cache salt.
    pub cache_salt: Vec<u8>,
}

impl KeyParts {
    /// Takes canonical bytes apart; anything that [`ChunkKey::new`] would not have written is malformed.
    pub fn parse(canonical: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader { bytes: canonical, offset: 0 };
        let parts = Self {
            namespace: read_namespace(&mut reader)?,
            kv_rank: reader.number()?,
            object_group: reader.number()?,
            chunk_hash: reader.field()?.to_vec(),
            cache_salt: reader.field()?.to_vec(),
        };
        if reader.offset != canonical.len() {
            return Err(reader.malformed());
        }
        if !(8..=64).contains(&parts.chunk_hash.len()) {
            return Err(KeyError::HashLength { bytes: parts.chunk_hash.len() });
        }
        Ok(parts)
    }
}

fn read_namespace(reader: &mut Reader<'_>) -> Result<Namespace, KeyError> {
    Ok(Namespace {
        model: reader.text()?,
        weights: reader.text()?,
        dtype: reader.text()?,
        layout: reader.text()?,
        chunk_tokens: reader.number()?,
        serde: reader.text()?,
        hash_algorithm: reader.text()?,
        hash_seed: reader.text()?,
        tensor_parallel: reader.number()?,
        pipeline_parallel: reader.number()?,
        context_parallel: reader.number()?,
        engine: reader.text()?,
        engine_major: reader.number()?,
        extra: read_extra(reader)?,
    })
}

fn read_extra(reader: &mut Reader<'_>) -> Result<BTreeMap<String, String>, KeyError> {
    let count = reader.number()?;
    let mut extra = BTreeMap::new();
    for _ in 0..count {
        let (name, value) = (reader.text()?, reader.text()?);
        // Canonical order is strictly ascending: a repeated or unsorted name is not ours.
        if extra.last_key_value().is_some_and(|(last, _)| *last >= name) {
            return Err(reader.malformed());
        }
        extra.insert(name, value);
    }
    Ok(extra)
}

struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn malformed(&self) -> KeyError {
        KeyError::Malformed { offset: self.offset }
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], KeyError> {
        let rest = self.bytes.get(self.offset..).unwrap_or_default();
        let taken = rest.get(..bytes).ok_or_else(|| self.malformed())?;
        self.offset += bytes;
        Ok(taken)
    }

    fn length(&mut self) -> Result<usize, KeyError> {
        let bytes = self.take(4)?.try_into().map_err(|_| self.malformed())?;
        usize::try_from(u32::from_le_bytes(bytes)).map_err(|_| self.malformed())
    }

    fn field(&mut self) -> Result<&'a [u8], KeyError> {
        let bytes = self.length()?;
        self.take(bytes)
    }

    fn text(&mut self) -> Result<String, KeyError> {
        let field = self.field()?;
        String::from_utf8(field.to_vec()).map_err(|_| self.malformed())
    }

    fn number(&mut self) -> Result<u32, KeyError> {
        let bytes = self.field()?.try_into().map_err(|_| self.malformed())?;
        Ok(u32::from_le_bytes(bytes))
    }
}
