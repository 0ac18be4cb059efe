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
            unsafe { copy(bytes.as_ptr(), self.0.buf_ptr().cast::<u8>(), bytes.len()) };
        }
        true
    }
}

/// Copies what nobody here looks at again: the destination is not read into the caches first, and does not push out of
/// them what is copied next. On chunks of some megabytes that takes half the time of an ordinary copy.
///
/// # Safety
/// Both places are valid for `len` bytes and do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };
    /// Bytes of a line of the caches, and how far ahead of the copy lines are asked for.
    const LINE: usize = 64;
    const AHEAD: usize = 1024;
    const PART: usize = size_of::<__m128i>();
    let head = to.align_offset(LINE).min(len);
    let end = head + (len - head) / LINE * LINE;
    // SAFETY: the head is within `len`.
    unsafe { ptr::copy_nonoverlapping(from, to, head) };
    for line in (head..end).step_by(LINE) {
        // SAFETY: a prefetch has no effect where there is no memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line + AHEAD).cast()) };
        for at in (line..line + LINE).step_by(PART) {
            // SAFETY: whole lines are within `len`, and the source may begin anywhere.
            let value = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
            // SAFETY: likewise, and lines of the destination are aligned.
            unsafe { _mm_stream_si128(to.wrapping_add(at).cast(), value) };
        }
    }
    // SAFETY: this processor has it, as it has the streams. Others see them before what tells of them.
    unsafe { _mm_sfence() };
    // SAFETY: the tail is what is left of `len`.
    unsafe { ptr::copy_nonoverlapping(from.wrapping_add(end), to.wrapping_add(end), len - end) };
}

/// An ordinary copy.
///
/// # Safety
/// Both places are valid for `len` bytes and do not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
}
