"""LMCache's storage managers, each with one back end: store all chunks, read all chunks."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from content import Content
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.event_manager import EventManager, EventType
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend import storage_manager as in_process

WAIT_S = 120.0
"""Longer than any step: what has not come by then does not come."""
ROOM = 1.15
"""Memory for what is read at once, and some for the allocator."""
GIB = 1 << 30
MODEL = "bench/model"


@dataclass
class Shape:
    """What is stored and read."""

    chunk_bytes: int
    chunks: int
    requests: int

    @property
    def memory_gib(self) -> float:
        return self.chunks * self.chunk_bytes * ROOM / GIB

    @property
    def tensor(self) -> list[int]:
        """Keys and values of 256 tokens, in two bytes each: 2, layers, tokens, width."""
        layers = 4
        width, rest = divmod(self.chunk_bytes, 2 * layers * 256 * 2)
        assert rest == 0, f"{self.chunk_bytes} bytes make no chunk of 256 tokens"
        return [2, layers, 256, width]

    def by_request(self) -> list[list[int]]:
        """The numbers of every request's chunks."""
        each = -(-self.chunks // self.requests)
        numbers = list(range(self.chunks))
        return [numbers[at : at + each] for at in range(0, self.chunks, each)]


class Manager(Protocol):
    """One back end behind LMCache."""

    def store(self) -> None:
        """Stores all chunks and returns when all are on the devices."""

    def read(self) -> int:
        """Reads all chunks; how many came."""

    def check(self) -> int:
        """Compares what `read` brought, gives it back; bytes that were wrong."""

    def settle(self) -> int:
        """Returns when nothing is read any more; bytes that were read twice by then, since it was opened."""

    def close(self) -> None: ...


class MultiProcess:
    """The storage manager of LMCache's server, with these L2 adapters."""

    def __init__(self, shape: Shape, adapters: list[dict[str, Any]]) -> None:
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        arguments = ["--l1-size-gb", f"{shape.memory_gib:.2f}", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        arguments += ["--l2-prefetch-max-in-flight", "64"]
        for adapter in adapters:
            arguments += ["--l2-adapter", json.dumps(adapter)]
        self._manager = StorageManager(parse_args_to_config(parser.parse_args(arguments)))
        self._layout = MemoryLayoutDesc([torch.Size(shape.tensor)], [torch.bfloat16])
        self._content, self._chunk_bytes = Content(shape.chunk_bytes), shape.chunk_bytes
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        self._requests = [
            {ObjectKey(self._content.digest(number), MODEL, rank): number for number in numbers}
            for numbers in shape.by_request()
        ]
        self._read: list[dict[Any, int]] = []

    @property
    def _adapters(self) -> list[Any]:
        return [adapter for _, adapter in self._manager.l2_adapters()]

    def store(self) -> None:
        for request in self._requests:
            keys = list(request)
            objects = self._manager.reserve_write(keys, self._layout)
            assert len(objects) == len(keys), f"memory for {len(objects)} of {len(keys)} chunks"
            for key, number in request.items():
                self._content.fill(number, objects[key])
            self._manager.finish_write(keys)
            # A few requests at a time: what waits has memory of its own in some back ends.
            self._drain()
        for adapter in self._adapters:
            engine = getattr(adapter, "_engine", None)
            assert engine is None or engine.flush(WAIT_S), "staging is not empty"
        for request in self._requests:
            self._leave_memory(list(request))

    def _leave_memory(self, keys: list[Any]) -> None:
        """A store's locks go a moment after it."""
        end = time.monotonic() + WAIT_S
        while self._manager.delete_l1_keys(keys)[1]:
            if time.monotonic() > end:
                raise TimeoutError("chunks do not leave memory")
            time.sleep(0.01)

    def _drain(self) -> None:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            status = self._manager.report_status()["store_controller"]
            if status["pending_keys_count"] == 0 and status["in_flight_task_count"] == 0:
                return
            time.sleep(0.005)
        raise TimeoutError("stores do not end")

    def read(self) -> int:
        specs = [PrefetchTaskSpec([GroupedObjectKeys(list(it), 0, self._layout)]) for it in self._requests]
        handles = [self._manager.submit_prefetch_task(spec) for spec in specs]
        hits = 0
        self._read = []
        for handle, request in zip(handles, self._requests, strict=True):
            if not self._manager.wait_prefetch_status(handle, WAIT_S):
                raise TimeoutError("a request does not end")
            result = self._manager.query_prefetch_status(handle)
            assert result.l1_hit_count == 0, "chunks were in memory"
            hits += result.l2_hit_count
            # A prefix, by LMCache's rule.
            self._read.append(dict(list(request.items())[: result.l2_hit_count]))
        return hits

    def check(self) -> int:
        wrong = 0
        for request in self._read:
            if not request:
                continue
            with self._manager.read_prefetched_results(list(request)) as objects:
                assert objects is not None, "what was read is not in memory"
                for number, found in zip(request.values(), objects, strict=True):
                    wrong += self._content.wrong_bytes(number, found)
            self._manager.finish_read_prefetched(list(request))
        self._read = []
        return wrong

    def settle(self) -> int:
        engines = [it._engine for it in self._adapters if hasattr(it, "_engine")]
        if not engines:
            return 0
        before = -1
        while True:
            stats = [engine.stats() for engine in engines]
            read = sum(tier["read_bytes"] for it in stats for tier in it["tiers"])
            if read == before:
                return read - sum(tier["payload_bytes"] for it in stats for tier in it["tiers"])
            before = read
            time.sleep(0.25)

    def sample(self, count: int) -> tuple[Any, list[Any], int]:
        """The first adapter, some keys that it holds, and the bytes of each chunk."""
        keys = [key for request in self._requests for key in request]
        return self._adapters[0], keys[:count], self._chunk_bytes

    def close(self) -> None:
        self._manager.close()


class Answers:
    """In place of LMCache's look-up server: how many tokens of each request came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens: dict[str, int] = {}

    def send_response_to_scheduler(self, lookup_id: str, tokens: int) -> None:
        with self._changed:
            self._tokens[lookup_id] = tokens
            self._changed.notify_all()

    def wait(self, names: list[str]) -> list[int]:
        """Tokens of these requests, once all are answered."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(name in self._tokens for name in names), WAIT_S):
                raise TimeoutError("a request does not end")
            return [self._tokens.pop(name) for name in names]


class InProcess:
    """The storage manager inside a serving engine, with its LocalDiskBackend or a RemoteBackend."""

    def __init__(self, shape: Shape, backend: str, options: dict[str, Any], is_async: bool) -> None:
        two, layers, tokens, width = shape.tensor
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, max_local_cpu_size=shape.memory_gib, enable_async_loading=is_async, **options
        )
        self._metadata = LMCacheMetadata(
            MODEL, 1, 1, 0, 0, torch.bfloat16, (layers, two, tokens, width // 64, 64), role="worker"
        )
        PinMonitor.GetOrCreate(config)
        self._answers, self._events = Answers(), EventManager()
        self._manager = in_process.StorageManager(
            config, self._metadata, event_manager=self._events, async_lookup_server=self._answers
        )
        self._name, self._backend = backend, self._manager.storage_backends[backend]
        self._is_async, self._tokens = is_async, tokens
        self._content = Content(shape.chunk_bytes)
        self._requests = [
            {CacheEngineKey(MODEL, 1, 0, self._hash(number), torch.bfloat16): number for number in numbers}
            for numbers in shape.by_request()
        ]
        self._read: list[tuple[int, Any]] = []
        self._turn = 0

    def _hash(self, number: int) -> int:
        return int.from_bytes(self._content.digest(number)[:8], "big") >> 1

    def store(self) -> None:
        for request in self._requests:
            self._put(request)
            end = time.monotonic() + WAIT_S
            while not all(self._backend.contains(key) for key in request):
                if time.monotonic() > end:
                    raise TimeoutError("stores do not end")
                time.sleep(0.005)

    def _put(self, request: dict[Any, int]) -> None:
        shapes, types = self._metadata.get_shapes(), self._metadata.get_dtypes()
        objects = self._manager.batched_allocate(shapes, types, len(request), MemoryFormat.KV_2LTD)
        for number, found in zip(request.values(), objects, strict=True):
            self._content.fill(number, found)
        self._manager.batched_put(list(request), objects)

    def read(self) -> int:
        self._read = []
        return self._read_async() if self._is_async else self._read_sync()

    def _read_sync(self) -> int:
        """As a serving engine's worker: request after request."""
        for request in self._requests:
            objects = self._manager.batched_get(list(request), location=self._name)
            for number, found in zip(request.values(), objects or (), strict=False):
                if found is None:
                    break
                self._read.append((number, found))
        return len(self._read)

    def _read_async(self) -> int:
        """As the look-ups of one scheduler pass: all requests at once."""
        self._turn += 1
        names = [f"{self._turn}-{at}" for at in range(len(self._requests))]
        for name, request in zip(names, self._requests, strict=True):
            lengths = [self._tokens * at for at in range(len(request) + 1)]
            ask = self._manager.async_lookup_and_prefetch(name, list(request), lengths, None, False)
            asyncio.run_coroutine_threadsafe(ask, self._manager.loop)
        tokens = self._answers.wait(names)
        for name, request in zip(names, self._requests, strict=True):
            found = self._events.pop_event(EventType.LOADING, name).result()
            self._read += [(request[key], it) for tier in found for key, it in tier]
        return sum(it // self._tokens for it in tokens)

    def check(self) -> int:
        wrong = 0
        for number, found in self._read:
            wrong += self._content.wrong_bytes(number, found)
            if self._is_async:
                found.unpin()
            found.ref_count_down()
        self._read = []
        return wrong

    def settle(self) -> int:
        return 0

    def close(self) -> None:
        self._manager.close()
