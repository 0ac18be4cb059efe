"""LMCache: an L2 adapter of the multiprocess server, `--l2-adapter '{"type": "plugin", ...}'`.

Thin: keys, bits and file descriptors are translated here, everything else is the engine's. Look-ups are answered
from memory on the caller's thread. Nothing is written into LMCache's buffers but inside `query_load_result`, and
nothing is read from them but inside `submit_store_task` and `pop_completed_store_tasks`: at any other time LMCache
may have given them to somebody else.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvbraid import ConfigError, Engine, Key, KeySpace, Load, _tested
from kvbraid import KeyError as BadKey
from kvbraid.lmcache_steps.steps import Steps

TESTED_VERSION = "0.5.6"
STORE_WAIT_S = 30.0
"""How long a store waits for room in staging; LMCache keeps its buffers for us ten times as long."""
FORGOTTEN_S = 120.0
"""What ended so long ago and was not asked for is given up: LMCache tells nobody of the requests that it gives up."""
SHORT = 8
"""Bytes of the shortest hash that the engine takes; LMCache's own checks use shorter ones."""
SPACES_MAX = 256
"""Models whose key spaces are kept."""
RETRY = ("staging_full", "queue_full")

_log = logging.getLogger(__name__)


class L2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params`: `config`, a path (or the configuration itself), and `namespace` unless the configuration has it."""

    def __init__(self, config: str | dict[str, Any], namespace: dict[str, Any] | None = None) -> None:
        self.config = config
        self.namespace = namespace

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> L2AdapterConfig:
        unknown = sorted(set(d) - {"config", "namespace"})
        if unknown:
            raise ConfigError(f"adapter_params: {', '.join(unknown)}: write config and namespace only")
        if not d.get("config"):
            raise ConfigError("adapter_params.config: is missing; write the path of a KVBraid configuration")
        return cls(d["config"], d.get("namespace"))

    @classmethod
    def help(cls) -> str:
        return "KVBraid: config (path of its TOML, or a dict), namespace (dict, unless the configuration has it)"


@dataclass
class _Found:
    """A look-up's answer, and the locks that come with it."""

    bits: Bitmap
    locked: list[Key]
    at: float = field(default_factory=time.monotonic)


@dataclass
class _Waiting:
    """A load, and where its keys stood in the task."""

    load: Load
    places: list[int]
    keys: list[ObjectKey]
    ended: float | None = None
    """When it was first seen ended."""


@dataclass
class _Store:
    """A store task, as far as it has come."""

    task: int
    keys: list[ObjectKey]
    native: list[Key]
    objects: list[Any]
    failed: bool
    stored_bytes: int = 0
    ends: float = field(default_factory=lambda: time.monotonic() + STORE_WAIT_S)


class L2Adapter(L2AdapterInterface):
    """All tiers of a KVBraid engine as one L2 adapter."""

    config_class_name = "L2AdapterConfig"

    def __init__(self, config: L2AdapterConfig, l1_memory_desc: object = None) -> None:
        # The engine evicts by itself, within the cap of each tier: LMCache sees no capacity to enforce.
        super().__init__(max_capacity_bytes=0)
        _tested.check("lmcache", "LMCache", TESTED_VERSION)
        self._engine = Engine(config.config)
        try:
            self._namespace = _namespace(config, self._engine)
            self._space("")
        except Exception:
            self._engine.close()
            raise
        self.steps = Steps(self._engine)
        self._lock = threading.Lock()
        self._tasks = itertools.count(1)
        self._lookups: dict[int, _Found] = {}
        self._loads: dict[int, _Waiting] = {}
        self._stalled: list[_Store] = []
        self._stored: dict[int, L2StoreResult] = {}
        self._spaces: dict[tuple[str, int], KeySpace] = {}
        self._known: dict[bytes, tuple[ObjectKey, int]] = {}
        self._recalled = False
        self._lookup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._load_fd, self._store_fd = self._engine.load_fd, self._engine.room_fd
        self._has_warned = False
        self._closed = False
        """Set under the lock before any descriptor is closed: later their numbers are somebody else's files."""

    def get_store_event_fd(self) -> int:
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        return self._load_fd

    # Stores: copied to staging at once; what does not fit is copied as soon as staging has room.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        if len(keys) != len(objects):
            raise ValueError(f"{len(keys)} keys and {len(objects)} objects")
        places, native = self._native(keys)
        picked = [keys[place] for place in places]
        store = _Store(next(self._tasks), picked, native, [objects[place] for place in places], len(places) < len(keys))
        self._advance(store)
        self.steps.storing()
        self._drop_gone()
        return store.task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            stalled, self._stalled = self._stalled, []
        for store in stalled:
            try:
                self._advance(store)
            except Exception as error:
                # The others go on, and LMCache is told: it would keep its memory for a store that never ends.
                _log.warning("KVBraid: a store that waited for room failed: %s", error)
                self._end(store, successful=False)
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def _advance(self, store: _Store) -> None:
        results = self._engine.store(store.native, [it.byte_array for it in store.objects])
        sizes = [it.get_size() for it in store.objects]
        late = time.monotonic() > store.ends
        left: list[int] = []
        new: list[tuple[Key, ObjectKey, int]] = []
        for place, result in enumerate(results):
            if result in ("staged", "held"):
                store.stored_bytes += sizes[place]
                new.append((store.native[place], store.keys[place], sizes[place]))
            elif result in RETRY and not late:
                left.append(place)
            else:
                store.failed = True
                if result == "too_large":
                    self._warn_too_large(sizes[place])
        self._note(new)
        store.keys = [store.keys[place] for place in left]
        store.native = [store.native[place] for place in left]
        store.objects = [store.objects[place] for place in left]
        if left:
            with self._lock:
                self._stalled.append(store)
            self._engine.ring_when_room()
        else:
            self._end(store, successful=not store.failed)

    def _warn_too_large(self, size: int) -> None:
        """Once: LMCache names the keys of stores that fail, and not why."""
        if not self._has_warned:
            self._has_warned, most = True, self._engine.chunk_bytes_max
            problem = f"an object of {size} bytes is larger than [engine] chunk_bytes_max = {most}: none such is kept"
            _log.warning('KVBraid: %s; write chunk_bytes_max = "%d KiB" or more', problem, -(-size // 1024))

    def _end(self, store: _Store, *, successful: bool) -> None:
        with self._lock:
            self._stored[store.task] = L2StoreResult(successful, store.stored_bytes)
        self._ring(self._store_fd)

    def _ring(self, fd: int) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(fd, 1)

    # Look-ups and locks.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        places, native = self._native(keys)
        hits = self._engine.lock(native)
        task, locked = next(self._tasks), [key for key, hit in zip(native, hits, strict=True) if hit]
        self._unlock_forgotten()
        with self._lock:
            self._lookups[task] = _Found(_bitmap(len(keys), places, hits), locked)
        self._ring(self._lookup_fd)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            found = self._lookups.pop(task_id, None)
        if found is None:
            return None
        self.steps.answered(found.bits.popcount())
        return found.bits

    def _unlock_forgotten(self) -> None:
        """Takes back the locks of answers that nobody fetched: who fetches one after all gets a miss."""
        now, locked = time.monotonic(), []
        with self._lock:
            # In order of submission.
            for task, found in list(itertools.takewhile(lambda it: now - it[1].at > FORGOTTEN_S, self._lookups.items())):
                locked += found.locked
                found.locked, found.bits = [], Bitmap(len(found.bits))
                if now - found.at > 10 * FORGOTTEN_S:
                    del self._lookups[task]
        if locked:
            self._engine.unlock(locked)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._engine.unlock(self._native(keys)[1])
        self.steps.unlocked(len(keys))

    # Loads.

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        if len(keys) != len(objects):
            raise ValueError(f"{len(keys)} keys and {len(objects)} objects")
        places, native = self._native(keys)
        ranks = [keys[place].kv_rank >> 16 & 0xFF for place in places]
        load = self._engine.submit_load(native, [objects[place].byte_array for place in places], ranks)
        task, now = next(self._tasks), time.monotonic()
        with self._lock:
            for number, it in list(self._loads.items()):
                # LMCache hears of the end after it: until then nobody can have forgotten it.
                if it.ended is None:
                    it.ended = now if it.load.done else None
                elif now - it.ended > FORGOTTEN_S:
                    del self._loads[number]
            self._loads[task] = _Waiting(load, places, keys)
        self.steps.submitted(len(keys))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        it = self._loads.get(task_id)
        hits = it.load.take() if it else None
        if it is None or hits is None:
            return None
        with self._lock:
            self._loads.pop(task_id, None)
        accessed = [it.keys[place] for place, hit in zip(it.places, hits, strict=True) if hit]
        if accessed:
            self._notify_keys_accessed(accessed)
        return _bitmap(len(it.keys), it.places, hits)

    # Eviction by LMCache, and what it may know.

    def delete(self, keys: list[ObjectKey]) -> None:
        places, native = self._native(keys)
        removed = self._engine.delete(native)
        self._forget([key.digest for key, gone in zip(native, removed, strict=True) if gone])

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Keys that are kept and that no tier dropped since. Those of earlier runs are read from the chunks' headers, once."""
        if page_size <= 0:
            raise ValueError("page_size: give at least 1")
        try:
            after = bytes.fromhex(cursor or "")
        except ValueError as error:
            raise ValueError("cursor: not one of ours") from error
        self._recall()
        self._drop_gone()
        with self._lock:
            known = [it for it in self._known.items() if model_name in (None, it[1][0].model_name) and it[0] > after]
        known.sort(key=lambda it: it[0])
        page = known[:page_size]
        entries = tuple(KeyEntry(key.to_encoded_object_key(), size) for _, (key, size) in page)
        return KeyListPage(entries, page[-1][0].hex() if len(known) > page_size else None)

    def report_status(self) -> dict[str, Any]:
        if self._engine.closed:
            return {"is_healthy": False, "type": type(self).__name__, "problem": "closed"}
        stats = self._engine.stats()
        tiers = {it["name"]: it["breaker"] for it in stats["tiers"]}
        healthy = any(breaker == "closed" for breaker in tiers.values())
        marks = self.steps.report()
        return {"is_healthy": healthy, "type": type(self).__name__, "tiers": tiers, "stats": stats, "marks": marks}

    def close(self) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
            self._stalled.clear()
            self._loads.clear()
        self._engine.close()
        if not was_closed:
            os.close(self._lookup_fd)

    def _note(self, stored: list[tuple[Key, ObjectKey, int]]) -> None:
        with self._lock:
            new = [(native.digest, key, size) for native, key, size in stored]
            new = [it for it in new if it[0] not in self._known]
            self._known.update({digest: (key, size) for digest, key, size in new})
        if new:
            self._notify_keys_stored([key for _, key, _ in new], [size for _, _, size in new])

    def _recall(self) -> None:
        """Learns the keys of chunks that earlier runs stored."""
        with self._lock:
            recalled, self._recalled = self._recalled, True
        if recalled:
            return
        found: list[tuple[Key, ObjectKey, int]] = []
        for it in self._engine.kept(self._namespace["model"]):
            extra = it["namespace"]["extra"]
            short = int(extra.get("lmcache.hash_bytes", len(it["chunk_hash"])))
            try:
                name, salt = extra["lmcache.model_name"], it["salt"].decode()
                key = ObjectKey(it["chunk_hash"][:short], name, it["kv_rank"], it["object_group"], salt)
            except (KeyError, ValueError):
                continue  # another adapter's
            # Of another namespace of this model it is not ours.
            found += [(made, key, it["payload_bytes"]) for made in self._native([key])[1] if made.digest == it["digest"]]
        self._note(found)

    def _forget(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            gone = [entry for digest in digests if (entry := self._known.pop(digest, None))]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    def _drop_gone(self) -> None:
        self._forget(self._engine.gone())

    def _space(self, model_name: str, hash_bytes: int = 32) -> KeySpace:
        extra = {**self._namespace.get("extra", {}), "lmcache.model_name": model_name}
        if hash_bytes < SHORT:
            # Padded hashes of different lengths are kept apart by their names.
            extra["lmcache.hash_bytes"] = str(hash_bytes)
        return KeySpace({**self._namespace, "extra": extra})

    def _native(self, keys: Sequence[ObjectKey]) -> tuple[list[int], list[Key]]:
        """The engine's keys, each with its place. What makes no key is left out: it is a miss."""
        if len(self._spaces) > SPACES_MAX:
            self._spaces = {}
        spaces = self._spaces
        places, native = [], []
        for place, key in enumerate(keys):
            name = (key.model_name, min(len(key.chunk_hash), SHORT))
            padded = key.chunk_hash.ljust(SHORT, b"\0")
            try:
                space = spaces.get(name)
                if space is None:
                    space = spaces[name] = self._space(*name)
                made = space.key(padded, kv_rank=key.kv_rank, object_group=key.object_group_id, salt=key.cache_salt)
            except (BadKey, ConfigError, OverflowError, UnicodeError):
                continue
            places.append(place)
            native.append(made)
        return places, native


def _bitmap(size: int, places: list[int], hits: list[bool]) -> Bitmap:
    bitmap = Bitmap(size)
    bitmap.batched_set([place for place, hit in zip(places, hits, strict=True) if hit])
    return bitmap


def _namespace(config: L2AdapterConfig, engine: Engine) -> dict[str, Any]:
    namespace = config.namespace or engine.namespace
    if namespace is None:
        raise ConfigError("namespace: is missing; write [namespace] into the configuration")
    if engine.persistent and namespace.get("hash_algorithm") == "builtin":
        raise ConfigError(
            "namespace.hash_algorithm: builtin hashes differ from process to process, and these tiers outlive one; "
            "start the server with --hash-algorithm blake3 or sha256_cbor and write that"
        )
    return namespace
