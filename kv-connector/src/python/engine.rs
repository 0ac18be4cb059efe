//! The engine, its queue of loads, and its locks.

use std::{
    collections::HashMap,
    process,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use kv_chunk::{ChunkKey, Namespace};
use pyo3::{prelude::*, types::PyBytes};

use super::{
    Buffer,
    background::Background,
    errors::{ClosedError, ConfigError, ForkedError, SizeError, from_engine},
    gone::Gone,
    guard, interruptible,
    jobs::{PyFill, PySeek, PyStage},
    keys::{PyKey, json_value, kept_chunk},
    live::{Live, detached, ends, register},
    load::{PyLoad, seconds},
    source::Source,
};
use crate::{
    CloseReport, Engine, EngineError, LoadQueue, LockTable, RequestWork, Schedule, StoreRefusal,
    Stored, Wanted,
    inspect::{PurgeRequest, Selector},
    sync::lock_plain,
};

/// A request of a scheduler: its name, tokens of its prompt to compute, tokens written, and the most that it may write.
type WorkTuple = (String, u64, u64, Option<u64>);

/// Chunks, and a buffer for each.
type Request<'py> = (Vec<Bound<'py, PyKey>>, Vec<Bound<'py, PyAny>>);

/// An engine that reads all storage tiers of a node at once.
#[pyclass(frozen, name = "Engine", module = "kvbraid")]
pub(crate) struct PyEngine {
    /// Taken out by `close`: who still holds the object, as LMCache does, holds none of its memory.
    live: Mutex<Option<Arc<Live>>>,
    /// What `close` said first.
    closed: OnceLock<CloseReport>,
    namespace: Option<Namespace>,
    chunk_bytes_max: u64,
    close_deadline: Duration,
    persistent: bool,
    shared: bool,
    /// Which of how many engines of the node.
    rank: (u32, u32),
    owner_pid: u32,
}

#[pymethods]
impl PyEngine {
    /// Opens the tiers of a configuration: a path, TOML text, or a dictionary. With `ranks`, the part of one of so many
    /// engines of this node.
    #[new]
    #[pyo3(signature = (config, *, rank = 0, ranks = None))]
    fn new(
        py: Python<'_>,
        config: &Bound<'_, PyAny>,
        rank: u32,
        ranks: Option<u32>,
    ) -> PyResult<Self> {
        if rank > 0 && ranks.is_none() {
            let problem = format!("ranks: is missing beside rank {rank}; write how many engines");
            return Err(ConfigError::new_err(format!("{problem} this node opens from it")));
        }
        let source = Source::of(py, config)?;
        let part = ranks.map(|ranks| (rank, ranks));
        if ends() {
            return Err(ClosedError::new_err("the interpreter is about to end"));
        }
        let opened = guard(|| {
            detached(py, || Self::open(source, part).map_err(|error| from_engine(&error)))
        })?;
        if let Some(live) = &*lock_plain(&opened.live) {
            register(live, opened.close_deadline);
        }
        Ok(opened)
    }

    /// `[namespace]` of the configuration.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.namespace.as_ref().map(|section| json_value(py, section)).transpose()
    }

    /// Whether any tier outlives this process.
    #[getter]
    fn persistent(&self) -> bool {
        self.persistent
    }

    /// Whether any tier is one that other nodes and ranks use, too.
    #[getter]
    fn shared(&self) -> bool {
        self.shared
    }

    /// Which chunks are readable now.
    fn lookup(&self, py: Python<'_>, keys: Vec<Bound<'_, PyKey>>) -> PyResult<Vec<bool>> {
        let live = self.live()?;
        let keys = chunk_keys(&keys);
        guard(|| Ok(detached(py, || live.engine.lookup(&keys).hits().to_vec())))
    }

    /// The longest chunk that it takes.
    #[getter]
    fn chunk_bytes_max(&self) -> u64 {
        self.chunk_bytes_max
    }

    /// Which chunks are readable now: no lock, no waiting, and so no other thread runs meanwhile.
    fn contains(&self, keys: Vec<Bound<'_, PyKey>>) -> PyResult<Vec<bool>> {
        let live = self.live()?;
        guard(|| Ok(live.engine.contains(&chunk_keys(&keys))))
    }

    /// Has tiers that other nodes write into look for chunks that are not known here.
    fn seek(&self, keys: Vec<Bound<'_, PyKey>>) -> PyResult<Option<PySeek>> {
        let live = self.live()?;
        guard(|| Ok(live.engine.seek(&chunk_keys(&keys)).map(PySeek)))
    }

    /// Which chunks are readable now; those stay until they are unlocked as often.
    fn lock(&self, py: Python<'_>, keys: Vec<Bound<'_, PyKey>>) -> PyResult<Vec<bool>> {
        let live = self.live()?;
        let keys = chunk_keys(&keys);
        guard(|| Ok(detached(py, || live.locks.lock(&live.engine, &keys))))
    }

    /// Takes back one lock of each chunk; the number of those that had none.
    fn unlock(&self, py: Python<'_>, keys: Vec<Bound<'_, PyKey>>) -> PyResult<usize> {
        let live = self.live()?;
        let keys = chunk_keys(&keys);
        guard(|| Ok(detached(py, || live.locks.unlock(&keys))))
    }

    /// Queues the load of chunks into buffers, each as long as its chunk.
    #[pyo3(signature = (keys, buffers, ranks = None))]
    fn submit_load(
        &self,
        keys: Vec<Bound<'_, PyKey>>,
        buffers: Vec<Bound<'_, PyAny>>,
        ranks: Option<Vec<u16>>,
    ) -> PyResult<PyLoad> {
        let live = self.live()?;
        if let Some(ranks) = &ranks {
            same_number(keys.len(), ranks.len(), "ranks")?;
        }
        let buffers = views(keys.len(), &buffers, Buffer::writable)?;
        apart(&buffers)?;
        let want = |(place, (key, buffer)): (usize, (&Bound<'_, PyKey>, &Buffer))| {
            let mut want = Wanted::new(key.get().0.clone(), buffer.len());
            want.rank = ranks.as_ref().map_or(0, |ranks| ranks[place]);
            want
        };
        let wants = keys.iter().zip(&buffers).enumerate().map(want).collect();
        guard(|| {
            let load = live.queue.submit(wants);
            Ok(PyLoad { load, buffers, owner_pid: self.owner_pid })
        })
    }

    /// Queues the loads of one whole scheduler step; the buffers are filled by a thread of the engine.
    fn submit_step(&self, loads: Vec<Request<'_>>) -> PyResult<Vec<PyFill>> {
        let live = self.live()?;
        let (mut wants, mut buffers) = (Vec::new(), Vec::new());
        for (keys, objects) in &loads {
            let views = views(keys.len(), objects, Buffer::writable)?;
            let want = |(key, view): (&Bound<'_, PyKey>, &Buffer)| {
                Wanted::new(key.get().0.clone(), view.len())
            };
            wants.push(keys.iter().zip(&views).map(want).collect());
            buffers.push(views);
        }
        apart(buffers.iter().flatten())?;
        guard(|| {
            let loads = live.queue.submit_step(wants).into_iter().zip(buffers);
            loads.map(|(load, views)| live.background.fill(load, views).map(PyFill)).collect()
        })
    }

    /// The step is whole: no other loads are waited for than those submitted.
    fn end_step(&self) -> PyResult<()> {
        let live = self.live()?;
        live.queue.end_step();
        Ok(())
    }

    /// Has a thread of the engine copy chunks into staging; they wait for room, `wait_s` from now at most.
    #[pyo3(signature = (keys, buffers, wait_s = 0.0))]
    fn submit_store(
        &self,
        keys: Vec<Bound<'_, PyKey>>,
        buffers: Vec<Bound<'_, PyAny>>,
        wait_s: f64,
    ) -> PyResult<PyStage> {
        let live = self.live()?;
        let buffers = views(keys.len(), &buffers, Buffer::readable)?;
        let keys = chunk_keys(&keys);
        guard(|| live.background.stage(&live.engine, keys, buffers, seconds(wait_s)).map(PyStage))
    }

    /// Copies chunks into staging; for each `staged`, `held`, or why it was refused.
    fn store(
        &self,
        py: Python<'_>,
        keys: Vec<Bound<'_, PyKey>>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<&'static str>> {
        let live = self.live()?;
        let buffers = views(keys.len(), &buffers, Buffer::readable)?;
        let keys = chunk_keys(&keys);
        guard(|| {
            Ok(detached(py, || {
                let mut scratch = Vec::new();
                let chunks = keys.iter().zip(&buffers);
                let store = |(key, buffer): (&ChunkKey, &Buffer)| {
                    name(live.engine.store(key, buffer.bytes(&mut scratch)))
                };
                chunks.map(store).collect()
            }))
        })
    }

    /// Removes chunks that are neither locked nor still to be written; for each, whether it is gone.
    fn delete(&self, py: Python<'_>, keys: Vec<Bound<'_, PyKey>>) -> PyResult<Vec<bool>> {
        let live = self.live()?;
        let keys = chunk_keys(&keys);
        guard(|| Ok(detached(py, || live.engine.delete(&keys))))
    }

    /// Removes all chunks of a model; whether nothing of it is left.
    fn purge(&self, py: Python<'_>, model: String) -> PyResult<bool> {
        let live = self.live()?;
        guard(|| {
            let request = PurgeRequest::new(Selector::model(model));
            Ok(detached(py, || live.engine.purge(&request)).is_ok_and(|report| report.complete))
        })
    }

    /// Chunks of a model that are on tiers now, by key.
    fn kept<'py>(&self, py: Python<'py>, model: String) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let live = self.live()?;
        let selector = Selector::model(model);
        let chunks =
            guard(|| Ok(detached(py, || live.engine.list(&selector)).unwrap_or_default()))?;
        chunks.into_iter().map(|chunk| kept_chunk(py, chunk)).collect()
    }

    /// Digests of chunks that nothing holds any more, since the last call.
    fn gone<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let live = self.live()?;
        let digests = detached(py, || {
            let mut digests = live.gone.take();
            digests.retain(|digest| live.engine.shared.directory.tiers(*digest) == 0);
            digests
        });
        Ok(digests.iter().map(|digest| PyBytes::new(py, &digest.to_bytes())).collect())
    }

    /// Says what a request will read, and when; the number of chunks claimed.
    #[pyo3(signature = (request, keys, time_to_use_s = None))]
    fn claim(
        &self,
        py: Python<'_>,
        request: &str,
        keys: Vec<Bound<'_, PyKey>>,
        time_to_use_s: Option<f64>,
    ) -> PyResult<u64> {
        let live = self.live()?;
        let (keys, until) = (chunk_keys(&keys), time_to_use_s.map(seconds));
        guard(|| Ok(detached(py, || live.engine.claim(request, &keys, until).chunks)))
    }

    /// Other times until use, by request; the number of requests that have a claim.
    fn revise(&self, py: Python<'_>, times_s: HashMap<String, Option<f64>>) -> PyResult<usize> {
        let live = self.live()?;
        let revise = |(request, time_s): (&String, &Option<f64>)| {
            live.engine.revise(request, time_s.map(seconds))
        };
        guard(|| Ok(detached(py, || times_s.iter().filter(|it| revise(*it)).count())))
    }

    /// What a scheduler runs and has waiting; the number of claims named.
    #[pyo3(signature = (running, waiting, *, slots, iteration_s, iteration_s_per_request = 0.0, prompt_token_s = 0.0,
                        read_ahead = 0, ended = Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "named by the caller")]
    fn schedule(
        &self,
        py: Python<'_>,
        running: Vec<WorkTuple>,
        waiting: Vec<WorkTuple>,
        slots: usize,
        iteration_s: f64,
        iteration_s_per_request: f64,
        prompt_token_s: f64,
        read_ahead: usize,
        ended: Vec<u64>,
    ) -> PyResult<usize> {
        let live = self.live()?;
        let schedule = Schedule {
            slots,
            iteration: seconds(iteration_s),
            iteration_per_request: seconds(iteration_s_per_request),
            prompt_token: seconds(prompt_token_s),
            running: running.into_iter().map(work).collect(),
            waiting: waiting.into_iter().map(work).collect(),
            read_ahead,
            ended,
        };
        guard(|| Ok(detached(py, || live.engine.schedule(schedule))))
    }

    /// Gives up what a request claimed; whether it had a claim.
    fn cancel(&self, py: Python<'_>, request: &str) -> PyResult<bool> {
        let live = self.live()?;
        guard(|| Ok(detached(py, || live.engine.cancel(request))))
    }

    /// An eventfd: a load has something to take.
    #[getter]
    fn load_fd(&self) -> PyResult<i32> {
        let live = self.live()?;
        Ok(std::os::fd::AsRawFd::as_raw_fd(&live.queue.load_fd()))
    }

    /// An eventfd: staging has room again, after `ring_when_room`.
    #[getter]
    fn room_fd(&self) -> PyResult<i32> {
        let live = self.live()?;
        Ok(std::os::fd::AsRawFd::as_raw_fd(&live.queue.room_fd()))
    }

    /// Has `room_fd` told once when staging has room.
    fn ring_when_room(&self) -> PyResult<()> {
        let live = self.live()?;
        live.queue.ring_when_room();
        Ok(())
    }

    /// The serving engine began a forward pass: a good time for writes.
    fn forward_began(&self) -> PyResult<()> {
        let live = self.live()?;
        live.engine.forward_began();
        Ok(())
    }

    /// The forward pass ended.
    fn forward_ended(&self) -> PyResult<()> {
        let live = self.live()?;
        live.engine.forward_ended();
        Ok(())
    }

    /// Writes everything staged; whether nothing is left.
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let live = self.live()?;
        interruptible(py, seconds(timeout_s), |part| live.engine.flush(part).drained)
    }

    /// Counters and gauges.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let live = self.live()?;
        let stats = guard(|| Ok(detached(py, || live.engine.stats())))?;
        let value = json_value(py, &stats)?;
        value.set_item("chunks_locked", live.locks.len())?;
        let (rank, ranks) = self.rank;
        value.set_item("rank", rank)?;
        value.set_item("ranks", ranks)?;
        Ok(value)
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.ours().is_err() || ends() || lock_plain(&self.live).is_none()
    }

    /// Writes what is staged and closes the tiers. A second call does nothing.
    #[pyo3(signature = (timeout_s = None))]
    fn close<'py>(&self, py: Python<'py>, timeout_s: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        self.ours()?;
        let limit = timeout_s.map_or(self.close_deadline, seconds);
        let report = guard(|| Ok(detached(py, || self.close_now(limit))))?;
        json_value(py, &report)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py, None).map(drop)
    }
}

fn work((request, prompt_tokens, output_tokens, output_tokens_max): WorkTuple) -> RequestWork {
    RequestWork { request, prompt_tokens, output_tokens, output_tokens_max }
}

impl PyEngine {
    fn open(source: Source, part: Option<(u32, u32)>) -> Result<Self, EngineError> {
        let mut config = source.read()?;
        if let Some((rank, ranks)) = part {
            config = config.for_rank(rank, ranks)?;
        }
        let gone = Arc::new(Gone::default());
        config.observer = Some(gone.observer());
        let (queue, namespace) = (config.queue.clone(), config.namespace.clone());
        let close_deadline = Duration::from_millis(config.engine.close_deadline_ms);
        let chunk_bytes_max = config.engine.chunk_bytes_max.0;
        let persistent = config.tiers.iter().any(|tier| tier.kind != crate::TierKind::Memory);
        let shared = config.tiers.iter().any(|tier| tier.kind == crate::TierKind::Shared);
        let engine = Arc::new(Engine::open(config)?);
        let queue = LoadQueue::new(Arc::clone(&engine), &queue)?;
        let live = Live {
            engine,
            queue,
            locks: LockTable::default(),
            background: Background::default(),
            gone,
        };
        Ok(Self {
            live: Mutex::new(Some(Arc::new(live))),
            closed: OnceLock::new(),
            namespace,
            chunk_bytes_max,
            close_deadline,
            persistent,
            shared,
            rank: part.unwrap_or((0, 1)),
            owner_pid: process::id(),
        })
    }

    fn ours(&self) -> PyResult<()> {
        if process::id() == self.owner_pid {
            return Ok(());
        }
        let problem = "the engine belongs to the parent process: open one of your own after a fork";
        Err(ForkedError::new_err(problem))
    }

    fn close_now(&self, limit: Duration) -> CloseReport {
        let live = lock_plain(&self.live).take();
        if let Some(live) = live {
            return *self.closed.get_or_init(|| live.close(limit));
        }
        // Another thread may be at it.
        self.closed.get().copied().unwrap_or_default()
    }

    fn live(&self) -> PyResult<Arc<Live>> {
        self.ours()?;
        let live = lock_plain(&self.live).clone().filter(|_| !ends());
        live.ok_or_else(|| ClosedError::new_err("the engine is closed"))
    }
}

impl Drop for PyEngine {
    fn drop(&mut self) {
        if self.closed() {
            return;
        }
        // Other Python threads go on while the tiers are closed.
        let limit = self.close_deadline;
        let closed = Python::try_attach(|py| detached(py, || self.close_now(limit)));
        if closed.is_none() {
            self.close_now(limit);
        }
    }
}

fn chunk_keys(keys: &[Bound<'_, PyKey>]) -> Vec<ChunkKey> {
    keys.iter().map(|key| key.get().0.clone()).collect()
}

/// What a method is given for its keys, seen as memory.
fn views<'py>(
    keys: usize,
    objects: &[Bound<'py, PyAny>],
    view: fn(&Bound<'py, PyAny>, usize) -> PyResult<Buffer>,
) -> PyResult<Vec<Buffer>> {
    same_number(keys, objects.len(), "buffers")?;
    objects.iter().enumerate().map(|(place, object)| view(object, place)).collect()
}

/// No byte of memory is the place of two chunks: of both only one could be there in the end.
fn apart<'a>(buffers: impl IntoIterator<Item = &'a Buffer>) -> PyResult<()> {
    let places =
        |(place, buffer): (usize, &'a Buffer)| buffer.addresses().map(move |it| (it, place));
    let mut pieces: Vec<_> = buffers.into_iter().enumerate().flat_map(places).collect();
    pieces.sort_unstable_by_key(|(piece, _)| piece.start);
    match pieces.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
        Some(pair) => {
            let (one, other) = (pair[0].1.min(pair[1].1), pair[0].1.max(pair[1].1));
            let problem = format!("buffers {one} and {other} overlap: give each chunk its own");
            Err(SizeError::new_err(problem))
        }
        None => Ok(()),
    }
}

fn same_number(keys: usize, others: usize, what: &str) -> PyResult<()> {
    if keys == others {
        return Ok(());
    }
    Err(SizeError::new_err(format!("{keys} keys and {others} {what}: give one for each")))
}

pub(super) fn name(stored: Stored) -> &'static str {
    match stored {
        Stored::Staged => "staged",
        Stored::AlreadyHeld => "held",
        Stored::Refused(reason) => match reason {
            StoreRefusal::StagingFull => "staging_full",
            StoreRefusal::QueueFull => "queue_full",
            StoreRefusal::TooLarge => "too_large",
            StoreRefusal::NoTier => "no_tier",
            StoreRefusal::Closed => "closed",
        },
    }
}
