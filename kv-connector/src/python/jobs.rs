//! What is under way in the background, as Python sees it. Nothing here blocks but `wait`.

use std::sync::Arc;

use pyo3::prelude::*;

use super::{
    background::{Filling, Staging},
    interruptible,
    load::seconds,
};
use crate::Seek;

/// Buffers that are being filled. Dropping it takes them back.
#[pyclass(frozen, name = "Fill", module = "kvbraid")]
pub(crate) struct PyFill(pub(super) Arc<Filling>);

#[pymethods]
impl PyFill {
    /// Whether every buffer is filled or a miss.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.0.ours()?.is_done())
    }

    /// Waits until it is done; whether it is.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let job = self.0.ours()?;
        interruptible(py, seconds(timeout_s), |part| job.wait(part))
    }

    /// None while it is not done; then one bool for each buffer.
    fn hits(&self) -> PyResult<Option<Vec<bool>>> {
        Ok(self.0.ours()?.answer())
    }
}

impl Drop for PyFill {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// Buffers that are being copied to staging. Dropping it takes them back.
#[pyclass(frozen, name = "Stage", module = "kvbraid")]
pub(crate) struct PyStage(pub(super) Arc<Staging>);

#[pymethods]
impl PyStage {
    /// Whether every buffer was copied or refused.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.0.ours()?.is_done())
    }

    /// Waits until it is done; whether it is.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let job = self.0.ours()?;
        interruptible(py, seconds(timeout_s), |part| job.wait(part))
    }

    /// None while it is not done; then what became of each chunk.
    fn results(&self) -> PyResult<Option<Vec<&'static str>>> {
        Ok(self.0.ours()?.answer())
    }
}

impl Drop for PyStage {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// A question to tiers that other nodes write into.
#[pyclass(frozen, name = "Seek", module = "kvbraid")]
pub(crate) struct PySeek(pub(super) Seek);

#[pymethods]
impl PySeek {
    /// Whether all have answered, or their time is up.
    #[getter]
    fn done(&self) -> bool {
        self.0.is_done()
    }
}
