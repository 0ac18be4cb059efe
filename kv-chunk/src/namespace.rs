//! What decides a chunk's bytes besides its tokens.

use std::collections::BTreeMap;

use crate::{KeyError, wire::Reader, wire::put};

/// All that decides a chunk's bytes besides the tokens. Two namespaces that differ in any field share no chunk.
///
/// Every field is mandatory: a text may not be blank (write `none` or `default` where the engine has nothing to say),
/// a size is at least 1. `extra` takes what this version has no field for, so that an unknown property still
/// separates chunks. [`validate`](Self::validate) says which field breaks that.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize, serde::Serialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Namespace {
    /// Model identity, such as a hub name or a hash of its configuration; not the display name it is served under.
    pub model: String,
    /// Revision or hash of the weights.
    pub weights: String,
    /// KV cache element type, such as `bf16` or `fp8_e4m3`.
    pub dtype: String,
    /// Attention and block layout and instruction-set packing, such as `NHD` or `HND/amx`.
    pub layout: String,
    /// Tokens per chunk.
    pub chunk_tokens: u32,
    /// Serialisation of the payload (`raw` if none).
    pub serde: String,
    /// Algorithm of the chunk hash.
    pub hash_algorithm: String,
    /// Seed of the chunk hash (`none` if it takes none).
    pub hash_seed: String,
    /// Tensor-parallel size.
    pub tensor_parallel: u32,
    /// Pipeline-parallel size.
    pub pipeline_parallel: u32,
    /// Context-parallel size.
    pub context_parallel: u32,
    /// Serving engine.
    pub engine: String,
    /// Its major version; 0 is one.
    pub engine_major: u32,
    /// Anything else that decides the bytes. Names may not be blank, values may.
    #[cfg_attr(feature = "serde", serde(default))]
    pub extra: BTreeMap<String, String>,
}

impl Namespace {
    /// Fails with the first field that is blank or zero and may not be.
    pub fn validate(&self) -> Result<(), KeyError> {
        self.view().validate()
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            model: &self.model,
            weights: &self.weights,
            dtype: &self.dtype,
            layout: &self.layout,
            chunk_tokens: self.chunk_tokens,
            serde: &self.serde,
            hash_algorithm: &self.hash_algorithm,
            hash_seed: &self.hash_seed,
            tensor_parallel: self.tensor_parallel,
            pipeline_parallel: self.pipeline_parallel,
            context_parallel: self.context_parallel,
            engine: &self.engine,
            engine_major: self.engine_major,
            extra: self.extra.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect(),
        }
    }
}

/// A namespace that borrows its texts. Encoding, decoding and validation work on it, so that a header on the read
/// path is checked without allocating, by the same rules that wrote it.
pub(crate) struct View<'a> {
    model: &'a str,
    weights: &'a str,
    dtype: &'a str,
    layout: &'a str,
    chunk_tokens: u32,
    serde: &'a str,
    hash_algorithm: &'a str,
    hash_seed: &'a str,
    tensor_parallel: u32,
    pipeline_parallel: u32,
    context_parallel: u32,
    engine: &'a str,
    engine_major: u32,
    /// Ascending by name, without repetition.
    extra: Vec<(&'a str, &'a str)>,
}

impl<'a> View<'a> {
    pub(crate) fn validate(&self) -> Result<(), KeyError> {
        let texts = [
            ("model", self.model),
            ("weights", self.weights),
            ("dtype", self.dtype),
            ("layout", self.layout),
            ("serde", self.serde),
            ("hash_algorithm", self.hash_algorithm),
            ("hash_seed", self.hash_seed),
            ("engine", self.engine),
        ];
        let blank = texts.iter().find(|(_, text)| text.trim().is_empty());
        if let Some(&(field, _)) = blank {
            return Err(KeyError::Blank { field });
        }
        if self.extra.iter().any(|(name, _)| name.trim().is_empty()) {
            return Err(KeyError::Blank { field: "extra (a name in it)" });
        }
        let sizes = [
            ("chunk_tokens", self.chunk_tokens),
            ("tensor_parallel", self.tensor_parallel),
            ("pipeline_parallel", self.pipeline_parallel),
            ("context_parallel", self.context_parallel),
        ];
        match sizes.iter().find(|(_, size)| *size == 0) {
            Some(&(field, _)) => Err(KeyError::Zero { field }),
            None => Ok(()),
        }
    }

    /// Appends the canonical encoding: the fields in declaration order, then `extra` as a count and its pairs.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        for text in [self.model, self.weights, self.dtype, self.layout] {
            put(out, text.as_bytes());
        }
        put(out, &self.chunk_tokens.to_le_bytes());
        for text in [self.serde, self.hash_algorithm, self.hash_seed] {
            put(out, text.as_bytes());
        }
        for number in [self.tensor_parallel, self.pipeline_parallel, self.context_parallel] {
            put(out, &number.to_le_bytes());
        }
        put(out, self.engine.as_bytes());
        put(out, &self.engine_major.to_le_bytes());
        put(out, &u32::try_from(self.extra.len()).unwrap_or(u32::MAX).to_le_bytes());
        for (name, value) in &self.extra {
            put(out, name.as_bytes());
            put(out, value.as_bytes());
        }
    }

    /// Reads what [`encode`](Self::encode) wrote of a valid namespace, and nothing else.
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, KeyError> {
        let view = Self {
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
            extra: decode_extra(reader)?,
        };
        view.validate()?;
        Ok(view)
    }

    pub(crate) fn to_namespace(&self) -> Namespace {
        Namespace {
            model: self.model.to_owned(),
            weights: self.weights.to_owned(),
            dtype: self.dtype.to_owned(),
            layout: self.layout.to_owned(),
            chunk_tokens: self.chunk_tokens,
            serde: self.serde.to_owned(),
            hash_algorithm: self.hash_algorithm.to_owned(),
            hash_seed: self.hash_seed.to_owned(),
            tensor_parallel: self.tensor_parallel,
            pipeline_parallel: self.pipeline_parallel,
            context_parallel: self.context_parallel,
            engine: self.engine.to_owned(),
            engine_major: self.engine_major,
            extra: self
                .extra
                .iter()
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        }
    }
}

fn decode_extra<'a>(reader: &mut Reader<'a>) -> Result<Vec<(&'a str, &'a str)>, KeyError> {
    // The count is not trusted with an allocation: the vector grows with the pairs that are really there.
    let count = reader.number()?;
    let mut extra: Vec<(&str, &str)> = Vec::new();
    for _ in 0..count {
        let pair = (reader.text()?, reader.text()?);
        // Canonical order is strictly ascending: a repeated or unsorted name is not ours.
        if extra.last().is_some_and(|last| last.0 >= pair.0) {
            return Err(reader.malformed());
        }
        extra.push(pair);
    }
    Ok(extra)
}
