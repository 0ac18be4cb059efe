//! What an engine is opened from.

use std::path::{Path, PathBuf};

use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyString},
};

use super::keys::json_text;
use crate::{Config, EngineError};

/// What an engine is opened from.
pub(super) enum Source {
    Path(PathBuf),
    Toml(String),
    Json(String),
}

impl Source {
    pub(super) fn of(py: Python<'_>, config: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(dictionary) = config.cast::<PyDict>() {
            return json_text(py, dictionary).map(Self::Json);
        }
        if let Ok(text) = config.cast::<PyString>() {
            // What is no Unicode is a path. Few paths have line breaks or brackets: such a file is there, or it is TOML.
            if let Ok(text) = text.to_str()
                && (text.contains('\n') || text.contains('[') && text.contains('='))
                && !Path::new(text).exists()
            {
                return Ok(Self::Toml(text.to_owned()));
            }
        }
        let path = config.extract::<PathBuf>();
        let wrong = || PyTypeError::new_err("config: give a path, TOML text or a dict");
        path.map(Self::Path).map_err(|_| wrong())
    }

    pub(super) fn read(self) -> Result<Config, EngineError> {
        match self {
            Self::Path(path) => Config::from_file(&path),
            Self::Toml(text) => Config::from_toml(&text),
            Self::Json(text) => Config::from_json(&text),
        }
    }
}
