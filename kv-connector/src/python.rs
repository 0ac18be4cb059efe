//! The native half of the Python package `kvbraid`: submission, completion and copies, nothing else.
//!
//! The interpreter lock is released around all that blocks or copies. No panic gets out: it becomes an
//! `InternalError`. After a fork the child is told so, and touches nothing.

#![expect(unsafe_code, reason = "the bytes of a caller's buffer are behind a pointer")]

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, slice,
    sync::Arc,
    time::{Duration, Instant},
};

use pyo3::{buffer::PyUntypedBuffer, prelude::*, types::PyMemoryView};

mod background;
mod engine;
mod errors;
mod gone;
mod jobs;
mod keys;
mod live;
mod load;
mod region;
mod source;

use self::{
    errors::{InternalError, SizeError},
    live::{detached, ends},
    region::PyPage,
};

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
        live::at_exit,
        load::PyLoad,
        region::{PyPage, PyRegion},
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

/// Waits by parts, `limit` in all, until `done` says so; whether it did. In between Python's signal handlers run: what they
/// raise ends it.
fn interruptible(
    py: Python<'_>,
    limit: Duration,
    done: impl Fn(Duration) -> bool + Send + Sync,
) -> PyResult<bool> {
    /// How long Ctrl-C waits.
    const PART: Duration = Duration::from_millis(100);
    let end = Instant::now() + limit;
    loop {
        let part = end.saturating_duration_since(Instant::now()).min(PART);
        // At the end of the interpreter it is asked once more, and nothing is waited for.
        let part = if ends() { Duration::ZERO } else { part };
        if guard(|| Ok(detached(py, || done(part))))? {
            return Ok(true);
        }
        py.check_signals()?;
        if part < PART {
            return Ok(false);
        }
    }
}

/// A caller's memory. Some of what has a buffer leaves out its strides, as arrays of ctypes do: a memoryview has them.
fn view_of(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    PyUntypedBuffer::get(object).or_else(|error| {
        let whole = PyMemoryView::from(object).map_err(|_| error)?;
        PyUntypedBuffer::get(&whole)
    })
}

/// A view of a caller's memory, kept in place as long as this lives: pieces of one buffer, in ascending order. They
/// make one chunk, the first piece first.
struct Buffer {
    view: Arc<PyUntypedBuffer>,
    pieces: Box<[Range<usize>]>,
}

impl Buffer {
    /// Of the `place`-th argument, to be read: a buffer, or a page of a region.
    fn readable(object: &Bound<'_, PyAny>, place: usize) -> PyResult<Self> {
        if let Ok(page) = object.cast::<PyPage>() {
            return Ok(page.get().buffer());
        }
        let view = view_of(object)?;
        if !view.is_c_contiguous() {
            let problem = format!("buffer {place} is not in one piece: give a contiguous one");
            return Err(SizeError::new_err(problem));
        }
        let whole = 0..view.len_bytes();
        Ok(Self { view: Arc::new(view), pieces: Box::new([whole]) })
    }

    /// Likewise, to be written.
    fn writable(object: &Bound<'_, PyAny>, place: usize) -> PyResult<Self> {
        let buffer = Self::readable(object, place)?;
        if buffer.view.readonly() {
            let problem = format!("buffer {place} is read-only: give a writable one");
            return Err(SizeError::new_err(problem));
        }
        Ok(buffer)
    }

    fn len(&self) -> usize {
        self.pieces.iter().map(ExactSizeIterator::len).sum()
    }

    /// Where its bytes are, the empty pieces left out.
    fn addresses(&self) -> impl Iterator<Item = Range<usize>> {
        let begin = self.view.buf_ptr().addr();
        let filled = self.pieces.iter().filter(|piece| !piece.is_empty());
        filled.map(move |piece| begin + piece.start..begin + piece.end)
    }

    /// Its bytes, gathered into `scratch` if they lie in many pieces. The caller of the Python method leaves them alone
    /// until it returns.
    fn bytes<'a>(&'a self, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        if let [piece] = &*self.pieces {
            return self.piece(piece);
        }
        scratch.clear();
        for piece in &self.pieces {
            scratch.extend_from_slice(self.piece(piece));
        }
        scratch
    }

    fn piece(&self, piece: &Range<usize>) -> &[u8] {
        let piece = piece.start..piece.end.min(self.view.len_bytes());
        if piece.is_empty() {
            return &[];
        }
        let start = self.view.buf_ptr().cast::<u8>().wrapping_add(piece.start);
        // SAFETY: the view keeps its bytes in one piece in place, the range ends within them, and the method's contract
        // is that nobody writes them before it returns.
        unsafe { slice::from_raw_parts(start, piece.len()) }
    }

    /// Copies `bytes` to it; false if they do not fit exactly.
    fn fill(&self, mut bytes: &[u8]) -> bool {
        let whole = self.view.len_bytes();
        let fits = self.pieces.iter().all(|piece| piece.end <= whole);
        if bytes.len() != self.len() || self.view.readonly() || !fits {
            return false;
        }
        for piece in &self.pieces {
            let (part, rest) = bytes.split_at(piece.len());
            bytes = rest;
            if part.is_empty() {
                continue;
            }
            let place = self.view.buf_ptr().cast::<u8>().wrapping_add(piece.start);
            // SAFETY: the view keeps `whole` writable bytes in one piece in place, the piece ends within them and is
            // as long as `part`, which lies in memory of ours; the method's contract is that nobody else touches the
            // buffer before it returns.
            unsafe { copy(part.as_ptr(), place, part.len()) };
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
