//! The native half of the Python package `kvbraid`: submission, completion and copies, nothing else.
//!
//! The interpreter lock is released around all that blocks or copies. No panic gets out: it becomes an
//! `InternalError`. After a fork the child is told so, and touches nothing.

#![expect(unsafe_code, reason = "the bytes of a caller's buffer are behind a pointer")]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, slice,
};

use pyo3::{buffer::PyUntypedBuffer, prelude::*};

mod background;
mod engine;
mod errors;
mod gone;
mod jobs;
mod keys;
mod load;

use self::errors::{InternalError, SizeError};

/// `kvbraid._native`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        engine::PyEngine,
        errors::{
            ClosedError, ConfigError, Error, ForkedError, InternalError, KeyError, OpenError,
            SizeError,
        },
        jobs::{PyFill, PySeek, PyStage},
        keys::{PyKey, PyKeySpace},
        load::PyLoad,
    };
}

/// Runs the body of a method: a panic becomes an error.
fn guard<T>(body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(InternalError::new_err(format!("a bug in kvbraid: {text}")))
    })
}

/// A view of a caller's memory: in one piece, kept in place as long as this lives.
struct Buffer(PyUntypedBuffer);

impl Buffer {
    /// Of the `place`-th argument, to be read.
    fn readable(object: &Bound<'_, PyAny>, place: usize) -> PyResult<Self> {
        let view = PyUntypedBuffer::get(object)?;
        if !view.is_c_contiguous() {
            let problem = format!("buffer {place} is not in one piece: give a contiguous one");
            return Err(SizeError::new_err(problem));
        }
        Ok(Self(view))
    }

    /// Likewise, to be written.
    fn writable(object: &Bound<'_, PyAny>, place: usize) -> PyResult<Self> {
        let buffer = Self::readable(object, place)?;
        if buffer.0.readonly() {
            let problem = format!("buffer {place} is read-only: give a writable one");
            return Err(SizeError::new_err(problem));
        }
        Ok(buffer)
    }

    fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// Its bytes. The caller of the Python method leaves them alone until it returns.
    fn bytes(&self) -> &[u8] {
        if self.len() == 0 {
            return &[];
        }
        // SAFETY: the view keeps `len` bytes in one piece in place, and the method's contract is that nobody writes
        // them before it returns.
        unsafe { slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), self.len()) }
    }

    /// Copies `bytes` to its beginning; false if they do not fit exactly.
    fn fill(&self, bytes: &[u8]) -> bool {
        if bytes.len() != self.len() || self.0.readonly() {
            return false;
        }
        if !bytes.is_empty() {
            // SAFETY: the view keeps `len` writable bytes in one piece in place, `bytes` is as long and lies in memory
            // of ours, and the method's contract is that nobody else touches the buffer before it returns.
            unsafe {
                ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    self.0.buf_ptr().cast::<u8>(),
                    bytes.len(),
                );
            };
        }
        true
    }
}
