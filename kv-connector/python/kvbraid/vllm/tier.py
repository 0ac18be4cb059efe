"""The tier: what vLLM's scheduler asks of it, step by step.

Thin: keys and results are translated here and in the modules beside, everything else is the engine's. No byte is copied
on the scheduler's thread: loads and stores run on threads of the engine, between its memory and vLLM's primary tier,
whose slots vLLM keeps for us until it has a job's result. Nothing is raised into the scheduler but by the constructor.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvbraid import ConfigError, Engine
from kvbraid.vllm.chunks import Chunks
from kvbraid.vllm.jobs import Loads, Stores
from kvbraid.vllm.lookups import Lookups
from kvbraid.vllm.namespace import of_engine

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

TESTED_VERSION = "0.32.0"
_PARAMETERS = "config, namespace and locality"
# vLLM shows the records of its own loggers only.
_log = logging.getLogger("vllm.kvbraid")


class Tier(SecondaryTierManager):
    """All tiers of a KVBraid engine as one secondary tier.

    `config` is a path (or the configuration itself); in a path, `{data_parallel_index}` is the replica's number, since no
    two engines share a directory. `namespace` replaces fields of the namespace that is found out here.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        config: str | dict[str, Any] | None = None,
        namespace: dict[str, Any] | None = None,
        locality: str | None = None,
        **unknown: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        _check_version()
        if unknown:
            raise ConfigError(f"secondary_tiers: {', '.join(sorted(unknown))}: write {_PARAMETERS} only")
        if not config:
            raise ConfigError("secondary_tiers: config is missing; write the path of a KVBraid configuration")
        if isinstance(config, str):
            index = offloading_spec.config.parallel.data_parallel_index
            config = config.replace("{data_parallel_index}", str(index))
        self.locality = None if locality is None else Locality(locality)
        self._engine = Engine(config)
        try:
            _check_size(self._engine, self.block_size_bytes)
            found = of_engine(offloading_spec, self.block_size_bytes, namespace or {}, self._engine.persistent)
            self._chunks = Chunks(found, primary_kv_view, self.block_size_bytes)
        except Exception:
            self._engine.close()
            raise
        self._lookups = Lookups(self._engine, self._chunks)
        self._loads = Loads(self._engine, self._chunks)
        self._stores = Stores(self._engine, self._chunks)
        _log.info("KVBraid keeps chunks of %d bytes under %s", self.block_size_bytes, found)

    @property
    def engine(self) -> Engine:
        """For those that tell it what vLLM tells no tier."""
        return self._engine

    @property
    def chunks(self) -> Chunks:
        """Names of chunks."""
        return self._chunks

    # Requests.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._lookups.lookup(key, req_context)

    # Jobs.

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._stores.submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loads.collect(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        # The first that the scheduler does in a step: the model has run. Writes wait for the next pass.
        self._hook("forward_ended")
        return [*self._loads.finished(), *self._stores.finished()]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.end_step()
        self._loads.end_step()
        self._hook("forward_began")

    def drain_jobs(self) -> None:
        self._loads.drain()
        self._stores.drain()

    def shutdown(self) -> None:
        self._loads.abandon()
        self._stores.abandon()
        report = self._engine.close()
        self._chunks.release()
        _log.info("KVBraid closed: %s", report)

    def _hook(self, name: str) -> None:
        if not self._engine.closed:
            getattr(self._engine, name)()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: what vLLM has in memory is not read from here, and may be evicted here."""


def _check_size(engine: Engine, chunk_bytes: int) -> None:
    if chunk_bytes > engine.chunk_bytes_max:
        raise ConfigError(
            f"engine.chunk_bytes_max: {engine.chunk_bytes_max} bytes do not hold a chunk of this model; "
            f'write "{-(-chunk_bytes >> 10)} KiB"'
        )


def _check_version() -> None:
    found = vllm.__version__
    if found.partition("+")[0] != TESTED_VERSION:
        _log.warning("kvbraid was tested with vLLM %s, this is %s", TESTED_VERSION, found)
