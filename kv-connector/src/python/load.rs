//! A submitted load.

use std::time::Duration;

use pyo3::prelude::*;

use super::{Buffer, errors::ForkedError, guard, interruptible, live::detached};
use crate::Load;

/// A load on its way, with the buffers that it goes to.
#[pyclass(frozen, name = "Load", module = "kvbraid")]
pub(crate) struct PyLoad {
    pub(super) load: Load,
    pub(super) buffers: Vec<Buffer>,
    pub(super) owner_pid: u32,
}

#[pymethods]
impl PyLoad {
    /// Whether every chunk has come or is a miss.
    #[getter]
    fn done(&self) -> bool {
        self.load.is_done()
    }

    fn __len__(&self) -> usize {
        self.buffers.len()
    }

    /// Waits until there is something to take, or all is done.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        interruptible(py, seconds(timeout_s), |part| self.load.wait(part))
    }

    /// Copies what has come into the buffers. None while it is not done, then one bool for each chunk.
    fn take(&self, py: Python<'_>) -> PyResult<Option<Vec<bool>>> {
        if std::process::id() != self.owner_pid {
            return Err(ForkedError::new_err("this load belongs to the parent process"));
        }
        guard(|| Ok(detached(py, || fill(&self.load, &self.buffers))))
    }
}

/// Copies what has come into the buffers; once all has, which of them were filled.
pub(super) fn fill(load: &Load, buffers: &[Buffer]) -> Option<Vec<bool>> {
    let mut failed = Vec::new();
    let mut answer = load.take(|place, bytes| {
        if !buffers[place].fill(bytes) {
            failed.push(place);
        }
    });
    if let Some(hits) = &mut answer {
        failed.into_iter().for_each(|place| hits[place] = false);
    }
    answer
}

/// A time to wait: at least nothing, at most a day.
pub(super) fn seconds(seconds: f64) -> Duration {
    const DAY_S: f64 = 86_400.0;
    Duration::from_secs_f64(if seconds > 0.0 { seconds.min(DAY_S) } else { 0.0 })
}
