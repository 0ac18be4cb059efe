"""Jobs: loads, collected during a step and read as one pool; stores, staged by a thread of the engine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvbraid import Engine, Error, Fill, Stage
from kvbraid.vllm.chunks import Chunks
from kvbraid.vllm.requests import Request

_log = logging.getLogger("vllm.kvbraid")

STORE_WAIT_S = 5.0
"""How long a store waits for room in staging; meanwhile vLLM cannot give its memory to others."""
DRAIN_S = 120.0
"""A load ends by `[queue] deadline_ms` by itself; this is for a bug."""

T = TypeVar("T", Fill, Stage)


@dataclass
class _Job(Generic[T]):
    """A job and what the engine does for it; nothing, if it could not be submitted."""

    job: TransferJob
    doing: T | None
    begun: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        return self.doing is None or self.doing.done

    def result(self, hits: list[bool], chunk_bytes: int) -> JobResult:
        keys = [key for key, hit in zip(self.job.keys, hits, strict=True) if hit]
        all_came = len(keys) == len(hits)
        return JobResult(
            self.job.job_id,
            success=all_came,
            successful_keys=None if all_came or not keys else keys,
            transfer_time=time.monotonic() - self.begun,
            transfer_bytes=len(keys) * chunk_bytes,
        )


class Loads:
    """Of every request of a step, one pool."""

    def __init__(self, engine: Engine, chunks: Chunks) -> None:
        self._engine = engine
        self._chunks = chunks
        self._collected: list[TransferJob] = []
        self._open: list[_Job[Fill]] = []

    def collect(self, job: TransferJob) -> None:
        """Remembers a job until the step ends."""
        self._collected.append(job)

    def end_step(self) -> None:
        """Submits what the step wants, at once: the pool is closed."""
        jobs, self._collected = self._collected, []
        if not jobs:
            return
        try:
            loads = [(self._chunks.keys(job.keys), self._chunks.rows(job.chunk_ids)) for job in jobs]
            fills = self._engine.submit_step(loads)
            self._open += [_Job(job, fill) for job, fill in zip(jobs, fills, strict=True)]
        except (Error, ValueError) as error:
            _log.warning("KVBraid: a step cannot be loaded, all of it is a miss: %s", error)
            self._open += [_Job[Fill](job, None) for job in jobs]

    def finished(self) -> list[JobResult]:
        """Of the jobs whose bytes are where they belong, or a miss."""
        done, self._open = _parted(self._open)
        return [self._result(it) for it in done]

    def _result(self, it: _Job[Fill]) -> JobResult:
        hits = it.doing.hits() if it.doing else None
        if hits is None:
            hits = [False] * len(it.job.keys)
        if not all(hits):
            failed = [key for key, hit in zip(it.job.keys, hits, strict=True) if not hit]
            Request.of(it.job.req_context).failed.update(failed)
            _log.warning("KVBraid: %d of %d chunks cannot be had, they are computed", len(failed), len(hits))
        return it.result(hits, self._chunks.chunk_bytes)

    def drain(self) -> None:
        """Returns when nothing is written into the primary tier any more. What was not submitted yet is a miss."""
        jobs, self._collected = self._collected, []
        self._open += [_Job[Fill](job, None) for job in jobs]
        _drain(self._open)

    def abandon(self) -> None:
        """Gives all memory back; nobody asks for results."""
        self._collected, self._open = [], []


class Stores:
    """Copied to staging in order; a chunk is readable from then on."""

    def __init__(self, engine: Engine, chunks: Chunks) -> None:
        self._engine = engine
        self._chunks = chunks
        self._open: list[_Job[Stage]] = []

    def submit(self, job: TransferJob) -> None:
        """Has the chunks copied. What finds no room in time is dropped: nobody misses it but a later request."""
        stage = None
        try:
            keys, rows = self._chunks.keys(job.keys), self._chunks.rows(job.chunk_ids)
            stage = self._engine.submit_store(keys, rows, STORE_WAIT_S)
        except (Error, ValueError) as error:
            _log.warning("KVBraid: %d chunks cannot be stored: %s", len(job.keys), error)
        self._open.append(_Job(job, stage))

    def finished(self) -> list[JobResult]:
        """Of the jobs whose memory is not needed any more."""
        done, self._open = _parted(self._open)
        return [self._result(it) for it in done]

    def _result(self, it: _Job[Stage]) -> JobResult:
        results = it.doing.results() if it.doing else None
        kept = [word in ("staged", "held") for word in results or [""] * len(it.job.keys)]
        return it.result(kept, self._chunks.chunk_bytes)

    def drain(self) -> None:
        """Returns when nothing is read from the primary tier any more."""
        _drain(self._open)

    def abandon(self) -> None:
        """Gives all memory back; nobody asks for results."""
        self._open = []


def _parted(jobs: list[_Job[T]]) -> tuple[list[_Job[T]], list[_Job[T]]]:
    """Those that are done and those that are not. Each is asked once: it may end at any time."""
    done: list[_Job[T]] = []
    left: list[_Job[T]] = []
    for it in jobs:
        (done if it.done else left).append(it)
    return done, left


def _drain(jobs: list[_Job[T]]) -> None:
    end = time.monotonic() + DRAIN_S
    for it in jobs:
        if it.doing is not None and not it.doing.wait(max(0.0, end - time.monotonic())):
            # Dropping it takes the memory back.
            it.doing = None
