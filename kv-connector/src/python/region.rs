//! Pages of a caller's memory whose bytes lie in many places: no copy is made to bring them together.

use std::{ops::Range, sync::Arc};

use pyo3::{buffer::PyUntypedBuffer, prelude::*};

use super::{Buffer, errors::SizeError, view_of};

/// A caller's memory that pages are cut from; it stays in place as long as this or one of its pages lives.
#[pyclass(frozen, name = "Region", module = "kvbraid")]
pub(crate) struct PyRegion {
    view: Arc<PyUntypedBuffer>,
}

/// A page of a region: what a chunk is stored from, or loaded into.
#[pyclass(frozen, name = "Page", module = "kvbraid")]
pub(crate) struct PyPage {
    view: Arc<PyUntypedBuffer>,
    pieces: Box<[Range<usize>]>,
}

#[pymethods]
impl PyRegion {
    #[new]
    fn new(buffer: &Bound<'_, PyAny>) -> PyResult<Self> {
        let view = view_of(buffer)?;
        if !view.is_c_contiguous() {
            return Err(SizeError::new_err(
                "the region is not in one piece: give a contiguous one",
            ));
        }
        Ok(Self { view: Arc::new(view) })
    }

    /// Cuts `count` pages, each of as many pieces: their addresses and sizes, page after page.
    fn pages(
        &self,
        addresses: Vec<usize>,
        sizes: Vec<usize>,
        count: usize,
    ) -> PyResult<Vec<PyPage>> {
        let each = addresses.len().checked_div(count).unwrap_or(0);
        if addresses.len() != sizes.len() || each * count != addresses.len() {
            let given = format!("{} addresses and {} sizes", addresses.len(), sizes.len());
            return Err(SizeError::new_err(format!(
                "{given} for {count} pages: give one for each piece"
            )));
        }
        if each == 0 {
            return Ok(Vec::new());
        }
        let pages = addresses.chunks(each).zip(sizes.chunks(each));
        pages.map(|(addresses, sizes)| self.page(addresses, sizes)).collect()
    }

    fn __len__(&self) -> usize {
        self.view.len_bytes()
    }
}

impl PyRegion {
    fn page(&self, addresses: &[usize], sizes: &[usize]) -> PyResult<PyPage> {
        let begin = self.view.buf_ptr().addr();
        let mut pieces = Vec::with_capacity(addresses.len());
        for (&address, &size) in addresses.iter().zip(sizes) {
            let start = address.checked_sub(begin);
            let end = start.and_then(|start| start.checked_add(size));
            let inside = start.zip(end).filter(|(_, end)| *end <= self.view.len_bytes());
            let Some((start, end)) = inside else {
                let problem = format!("{size} bytes at {address:#x} are not in the region");
                return Err(SizeError::new_err(problem));
            };
            pieces.push(start..end);
        }
        // In one order, whatever order the pieces are told in: a page is then the same chunk for all who store it.
        pieces.sort_unstable_by_key(|piece| piece.start);
        if pieces.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err(SizeError::new_err("pieces of a page overlap: give each byte once"));
        }
        pieces.dedup_by(|next, last| {
            let joined = last.end == next.start;
            if joined {
                last.end = next.end;
            }
            joined
        });
        Ok(PyPage { view: Arc::clone(&self.view), pieces: pieces.into() })
    }
}

#[pymethods]
impl PyPage {
    fn __len__(&self) -> usize {
        self.buffer().len()
    }
}

impl PyPage {
    pub(super) fn buffer(&self) -> Buffer {
        Buffer { view: Arc::clone(&self.view), pieces: self.pieces.clone() }
    }
}
