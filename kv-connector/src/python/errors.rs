//! The exceptions, and which of ours becomes which.

use std::error::Error as _;

use kv_chunk::KeyError as ChunkKeyError;
use pyo3::{create_exception, exceptions::PyException, prelude::*};

use crate::EngineError;

create_exception!(kvbraid, Error, PyException, "Everything that kvbraid raises.");
create_exception!(
    kvbraid,
    ConfigError,
    Error,
    "A configuration value; says the field and what to write."
);
create_exception!(kvbraid, OpenError, Error, "A tier, memory or a thread that cannot be had.");
create_exception!(kvbraid, ClosedError, Error, "The engine was closed.");
create_exception!(
    kvbraid,
    ForkedError,
    Error,
    "This process is a fork of the one that opened the engine."
);
create_exception!(kvbraid, KeyError, Error, "What is given for a key makes none.");
create_exception!(
    kvbraid,
    SizeError,
    Error,
    "A buffer of the wrong size or kind, or another number of buffers than keys."
);
create_exception!(kvbraid, InternalError, Error, "A bug in kvbraid.");

/// An error with its causes.
pub(super) fn from_engine(error: &EngineError) -> PyErr {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text += &format!(": {inner}");
        cause = inner.source();
    }
    match error {
        EngineError::Config { .. } | EngineError::Read { .. } => ConfigError::new_err(text),
        _ => OpenError::new_err(text),
    }
}

pub(super) fn from_key(error: &ChunkKeyError) -> PyErr {
    KeyError::new_err(error.to_string())
}
