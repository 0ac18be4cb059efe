"""SGLang: a HiCache storage backend, `--hicache-storage-backend dynamic`.

Thin: pages become chunks here, everything else is the engine's. One engine for each rank, which gets its part of the
node's configuration. A batch of pages is one step of all tiers. HiCache takes no exception from here: what fails is a
miss, and is logged.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from kvbraid import ConfigError, Engine, Key, _tested
from kvbraid._hicache_pages import Pages, Ranks, byte_view

TESTED_VERSION = "0.5.23"
STORE_WAIT_S = 10.0
"""How long a store waits for room in staging."""
LOG_EVERY_S = 10.0
KV = "kv"
LOADER = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
OURS = {"config", "weights", "model", "ranks"}

logger = logging.getLogger(__name__)


class HiCache(HiCacheStorage):
    """All tiers of a KVBraid engine as HiCache's storage."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        _tested.check("sglang", "SGLang", TESTED_VERSION)
        extra = _extra(storage_config)
        self._ranks = Ranks.of(storage_config)
        self._engine = Engine(extra["config"], rank=_number(storage_config), ranks=_local_ranks(storage_config, extra))
        try:
            self._identity = _identity(storage_config, extra, self._engine)
            self._given = self._engine.namespace
            if storage_config.is_mla_model and storage_config.tp_size > 1 and not self._engine.shared:
                raise ConfigError(
                    "tier: the pages of an MLA model are written by one rank and read by all, and no tier is common to "
                    'them; add one with kind = "shared" (a directory of a local disk will do)'
                )
        except Exception:
            self._engine.close()
            raise
        self._pools: dict[str, Pages] = {}
        self._lock = threading.Lock()
        self._moved: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}
        self._logged: dict[str, float] = {}

    # The pools, told once by SGLang before the first page.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, _name(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        pages = Pages(pool, name, self._ranks, self._identity)
        if pages.page_bytes > self._engine.chunk_bytes_max:
            raise ConfigError(
                f"engine.chunk_bytes_max: {self._engine.chunk_bytes_max} bytes, and a page of pool {name} has "
                f"{pages.page_bytes}; write at least that"
            )
        if name == KV:
            for field, found in pages.namespace.items():
                given = (self._given or {}).get(field, found)
                if given != found:
                    raise ConfigError(f"namespace.{field}: is {given!r}, SGLang has {found!r}; write that, or leave [namespace] out")
        self._pools[name] = pages

    # Pages between the pool's own memory and the tiers.

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self.batch_get_v2([PoolTransfer(KV, host_indices=host_indices, keys=keys)])[KV]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self.batch_set_v2([PoolTransfer(KV, host_indices=host_indices, keys=keys)])[KV]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The pages of all pools are one step."""
        results = {_name(it.name): [False] * len(it.keys or []) for it in transfers}
        with self._missing("read"):
            places, keys, buffers, landed = [], [], [], []
            for name, pages, transfer in self._known(transfers):
                names = transfer.keys or []
                targets, land = pages.targets(transfer.host_indices)
                places += [(name, place) for place in range(len(names))]
                landed += [land] * len(names)
                keys += pages.keys(names)
                buffers += targets
            for (name, place), land, hit in zip(places, landed, self._read(keys, buffers), strict=True):
                if hit:
                    land(place)
                    results[name][place] = True
        return results

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results = {_name(it.name): [False] * len(it.keys or []) for it in transfers}
        with self._missing("write"):
            for name, pages, transfer in self._known(transfers):
                results[name] = self._write(pages.keys(transfer.keys or []), pages.sources(transfer.host_indices))
        return results

    def _known(self, transfers: list[PoolTransfer]) -> Iterator[tuple[str, Pages, PoolTransfer]]:
        for transfer in transfers:
            pages = self._pools.get(_name(transfer.name))
            if pages is None or not pages.fits(transfer.keys or [], transfer.host_indices):
                self._log("places", f"pool {transfer.name} is not registered, or has not one place for each page")
                continue
            yield _name(transfer.name), pages, transfer

    # Pages in tensors of their own.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(keys)
        with self._missing("read"):
            pages = self._pools[KV]
            given = target_locations or [None] * len(keys)
            tensors = [pages.pool.get_dummy_flat_data_page() if it is None else it for it in given]
            hits = self._read(pages.keys(keys), [byte_view(it) for it in tensors])
            found = [it if hit else None for it, hit in zip(tensors, hits, strict=True)]
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        stored = False
        with self._missing("write"):
            tensors = target_locations if values is None else values
            stored = all(self._write(self._pools[KV].keys(keys), [byte_view(it.contiguous()) for it in tensors]))
        return stored

    # What is there.

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._present(KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv_pages = _leading(self._present(KV, keys))
        hits = {KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            present = self._present(_name(transfer.name), keys[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, _leading(present) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                # Only the window that ends with the prefix must be there.
                window = max(1, len(transfer.keys or []))
                lengths = {end for end in range(1, kv_pages + 1) if all(present[max(0, end - window) : end])}
            else:
                self._log("policy", f"pool {transfer.name}: {transfer.hit_policy} is not known here")
                lengths = set()
            if lengths:
                hits[_name(transfer.name)] = max(lengths)
            restorable = [it for it in restorable if it in lengths]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _present(self, name: str, keys: Sequence[str]) -> list[bool]:
        present = [False] * len(keys)
        with self._missing("look-up"):
            present = self._engine.lookup(self._pools[name].keys(keys))
        return present

    # The engine, and its end.

    def clear(self) -> bool:
        """Removes the model's chunks from this rank's tiers, and from common ones."""
        cleared = False
        with self._missing("clear"):
            cleared = self._engine.purge(self._identity["model"])
        return cleared

    def get_stats(self) -> Any:
        """SGLang's own figures since the last call; `kvbraid` in it has the engine's, and this rank's part of the node."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._moved = self._moved, {"prefetch": [], "backup": []}
        metrics = StorageMetrics()
        for kind, batches in moved.items():
            setattr(metrics, f"{kind}_pgs", [pages for pages, _ in batches])
            setattr(metrics, f"{kind}_bandwidth", [rate for _, rate in batches])
        metrics.kvbraid = {}
        with self._missing("stats"):
            metrics.kvbraid = self._engine.stats()
        return metrics

    def close(self) -> None:
        self._pools.clear()
        self._engine.close()

    def _read(self, keys: list[Key], buffers: list[Any]) -> list[bool]:
        begun = time.monotonic()
        load = self._engine.submit_load(keys, buffers, None)
        # It ends by itself, at `[queue] deadline_ms` at the latest.
        while (hits := load.take()) is None:
            load.wait(1.0)
        self._count("prefetch", [it for it, hit in zip(buffers, hits, strict=True) if hit], begun)
        return hits

    def _write(self, keys: list[Key], buffers: list[Any]) -> list[bool]:
        """Copies pages into staging; what finds no room waits for it, for a while."""
        begun = time.monotonic()
        stage = self._engine.submit_store(keys, buffers, STORE_WAIT_S)
        # It ends by itself: what finds no room in that time is refused.
        while not stage.wait(1.0):
            pass
        stored = [it in ("staged", "held") for it in stage.results() or [""] * len(keys)]
        self._count("backup", [it for it, well in zip(buffers, stored, strict=True) if well], begun)
        return stored

    def _count(self, kind: str, buffers: Sequence[Any], begun: float) -> None:
        if not buffers:
            return
        gigabytes = sum(it.nbytes if hasattr(it, "nbytes") else len(it) for it in buffers) / 1e9
        with self._lock:
            # Nobody may ask for them.
            del self._moved[kind][:-1000]
            self._moved[kind].append((len(buffers), gigabytes / max(time.monotonic() - begun, 1e-9)))

    @contextmanager
    def _missing(self, what: str) -> Iterator[None]:
        """What fails in here is a miss."""
        try:
            yield
        except Exception as error:
            self._log(what, f"{what} failed, which is a miss: {type(error).__name__}: {error}")

    def _log(self, what: str, text: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(what, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged[what] = now
            logger.warning("kvbraid: %s", text)


def _name(pool: Any) -> str:
    return str(getattr(pool, "value", pool))


def _leading(present: Sequence[bool]) -> int:
    return next((place for place, hit in enumerate(present) if not hit), len(present))


def _extra(storage_config: HiCacheStorageConfig) -> dict[str, Any]:
    """`--hicache-storage-backend-extra-config`, checked."""
    extra = storage_config.extra_config or {}
    unknown = sorted(set(extra) - LOADER - OURS)
    if unknown:
        raise ConfigError(f"extra config: {', '.join(unknown)}: of KVBraid there are {', '.join(sorted(OURS))}")
    if not extra.get("config"):
        raise ConfigError("extra config: config is missing; write the path of a KVBraid configuration")
    if not extra.get("interface_v1"):
        warnings.warn('extra config: without "interface_v1": 1 SGLang copies each page once more', stacklevel=3)
    return extra


def _identity(storage_config: HiCacheStorageConfig, extra: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Which model: what SGLang does not know of itself, the configuration says."""
    given = engine.namespace or {}
    model = extra.get("model") or given.get("model") or storage_config.model_name
    weights = extra.get("weights") or given.get("weights")
    for field, value in (("model", model), ("weights", weights)):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"extra config: {field} is missing; write {field}, such as the hub's name or revision")
    name = {"sglang.model_name": str(storage_config.model_name)}
    return {"model": model, "weights": weights, "extra": {**given.get("extra", {}), **name}}


def _number(config: HiCacheStorageConfig) -> int:
    """A number of its own for each rank."""
    place = config.dp_rank * config.pp_size + config.pp_rank
    place = place * config.attn_cp_size + config.attn_cp_rank
    return place * config.tp_size + config.tp_rank


def _local_ranks(config: HiCacheStorageConfig, extra: dict[str, Any]) -> int:
    """How many ranks share this node's configuration."""
    given = extra.get("ranks")
    if given is not None:
        if not isinstance(given, int) or given < 1:
            raise ConfigError(f"extra config: ranks is {given!r}; write how many ranks run on this node")
        return given
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from sglang.srt.mem_cache.pool_host.base import ranks_per_host

        return max(ranks_per_host(), 1)
    return config.tp_size * config.pp_size * config.attn_cp_size
