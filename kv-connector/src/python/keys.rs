//! Keys of chunks.

use std::hash::{DefaultHasher, Hash, Hasher};

use kv_chunk::{ChunkKey, KeySpace, Namespace};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    pybacked::PyBackedBytes,
    types::{PyBytes, PyDict, PyString},
};

use super::{
    errors::{ConfigError, from_key},
    guard,
};
use crate::inspect::KeptChunk;

/// Which chunk.
#[pyclass(frozen, name = "Key", module = "kvbraid")]
pub(crate) struct PyKey(pub(super) ChunkKey);

#[pymethods]
impl PyKey {
    /// The 16 bytes that name it in events.
    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.digest().to_bytes())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.digest().hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("Key({})", self.0.digest())
    }
}

/// Makes the keys of one namespace.
#[pyclass(frozen, name = "KeySpace", module = "kvbraid")]
pub(crate) struct PyKeySpace(KeySpace);

#[pymethods]
impl PyKeySpace {
    #[new]
    fn new(py: Python<'_>, namespace: &Bound<'_, PyDict>) -> PyResult<Self> {
        let text = json_text(py, namespace)?;
        guard(|| {
            let namespace: Namespace = serde_json::from_str(&text)
                .map_err(|error| ConfigError::new_err(format!("namespace: {error}")))?;
            let space = KeySpace::new(&namespace);
            Ok(Self(space.map_err(|error| ConfigError::new_err(error.to_string()))?))
        })
    }

    /// The key of one chunk.
    #[pyo3(signature = (chunk_hash, *, kv_rank = 0, object_group = 0, salt = None))]
    fn key(
        &self,
        chunk_hash: &[u8],
        kv_rank: u32,
        object_group: u32,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyKey> {
        let salt = salt.map_or(Ok(Vec::new()), salt_bytes)?;
        let key = self.0.key(kv_rank, object_group, chunk_hash, &salt);
        key.map(PyKey).map_err(|error| from_key(&error))
    }

    /// The keys of many chunks: of each, its object group and its hash.
    fn keys(&self, chunks: Vec<(u32, PyBackedBytes)>) -> PyResult<Vec<PyKey>> {
        let key = |(group, hash): &(u32, PyBackedBytes)| self.0.key(0, *group, hash, &[]);
        let keys = chunks.iter().map(|chunk| key(chunk).map(PyKey));
        keys.collect::<Result<_, _>>().map_err(|error| from_key(&error))
    }
}

fn salt_bytes(salt: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = salt.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes().to_vec());
    }
    let bytes = salt.cast::<PyBytes>();
    let bytes = bytes.map_err(|_| PyTypeError::new_err("salt: give str or bytes"))?;
    Ok(bytes.as_bytes().to_vec())
}

/// A dictionary as the JSON that the configuration is read from.
pub(super) fn json_text(py: Python<'_>, dictionary: &Bound<'_, PyDict>) -> PyResult<String> {
    let options = PyDict::new(py);
    // A path may stand where the file would have its text.
    options.set_item("default", py.import("os")?.getattr("fspath")?)?;
    py.import("json")?.call_method("dumps", (dictionary,), Some(&options))?.extract()
}

/// What serialises, as Python objects.
pub(super) fn json_value<'py>(
    py: Python<'py>,
    value: &impl serde::Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value)
        .map_err(|error| super::InternalError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

/// A chunk that some tier keeps, as a dictionary.
pub(super) fn kept_chunk(py: Python<'_>, chunk: KeptChunk) -> PyResult<Bound<'_, PyAny>> {
    let KeptChunk { key, payload_bytes, .. } = chunk;
    let value = PyDict::new(py);
    value.set_item("chunk_hash", PyBytes::new(py, &key.chunk_hash))?;
    value.set_item("kv_rank", key.kv_rank)?;
    value.set_item("object_group", key.object_group)?;
    value.set_item("salt", PyBytes::new(py, &key.cache_salt))?;
    value.set_item("namespace", json_value(py, &key.namespace)?)?;
    value.set_item("payload_bytes", payload_bytes)?;
    value.set_item("digest", PyBytes::new(py, &chunk.digest.to_bytes()))?;
    Ok(value.into_any())
}
