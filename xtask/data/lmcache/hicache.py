"""SGLang's HiCache over one of its storage back ends: pages of a real host pool, stored and read as its controller does."""

from __future__ import annotations

import time
from typing import Any

import torch
from content import Content
from mooncake_master import RETRY_S, Mooncake
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, LAYERS, DIM = 256, 4, 128
WAIT_S = 120.0


class View:
    """A page's bytes, as `Content` takes them."""

    def __init__(self, page: torch.Tensor) -> None:
        self.byte_array = page.view(torch.uint8).numpy().reshape(-1)


class HiCachePool:
    """One rank's host pool, large enough for everything that is read."""

    def __init__(self, shape: Any, order: dict[str, Any]) -> None:
        heads = shape.chunk_bytes // (2 * LAYERS * PAGE * DIM * 2)
        device = MHATokenToKVPool(PAGE, PAGE, torch.bfloat16, heads, DIM, LAYERS, "cpu", False, enable_alt_stream=False)
        tokens = (shape.chunks + 2) * PAGE
        places = {"device_capacity_tokens": PAGE, "start_layer": 0, "end_layer": LAYERS}
        # SGLang wants much of the machine to itself otherwise.
        with host_memory_budget_scope((shape.chunks + 4) * shape.chunk_bytes):
            info = device._mha_buffer_info()
            self._pool = MHATokenToKVPoolHost(
                info, tokens / PAGE, 0, PAGE, "page_first", pin_memory=False, device="cpu", **places
            )
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
        self._mooncake = Mooncake(order["mooncake"]) if "mooncake" in order else None
        extra = order["extra"] | (self._mooncake.client if self._mooncake else {})
        self._config = HiCacheStorageConfig(**ranks, **flags, model_name="bench/model", extra_config=extra)
        self._kind, self._is_v1 = order["hicache"], order["hicache"] != "file"
        self._open()
        self._content = Content(shape.chunk_bytes)
        self._names = [self._content.digest(number).hex() for number in range(shape.chunks)]
        self._hits: list[int] = []

    def _open(self) -> None:
        self._storage = StorageBackendFactory.create_backend(self._kind, self._config, self._pool)
        self._storage.register_mem_pool_host(self._pool)

    def _batches(self) -> list[range]:
        ends = range(0, len(self._names), STORAGE_BATCH_SIZE)
        return [range(at, min(at + STORAGE_BATCH_SIZE, len(self._names))) for at in ends]

    def _page(self, number: int) -> torch.Tensor:
        """A copy of a page, in most layouts of the pool."""
        return self._pool.get_data_page(number * PAGE, flat=True).contiguous()

    def store(self) -> None:
        for batch in self._batches():
            for number in batch:
                page = self._page(number)
                self._content.fill(number, View(page))
                self._pool.set_from_flat_data_page(number * PAGE, page)
            names = [self._names[it] for it in batch]
            if self._mooncake:
                self._store_patiently(names, self._places(batch))
            elif self._is_v1:
                assert all(self._storage.batch_set_v1(names, self._places(batch))), "pages were refused"
            else:
                assert self._storage.batch_set(names, [self._page(it) for it in batch]), "pages were refused"
        if self._mooncake:
            self._leave_memory(self._mooncake)
        engine = getattr(self._storage, "_engine", None)
        assert engine is None or engine.flush(WAIT_S), "staging is not empty"
        self._pool.kv_buffer.zero_()

    def _store_patiently(self, names: list[str], places: torch.Tensor) -> None:
        """Mooncake refuses pages until its memory has room; those that it has it does not take again."""
        end = time.monotonic() + WAIT_S
        while not all(self._storage.batch_set_v1(names, places)):
            if time.monotonic() > end:
                raise TimeoutError("pages are refused")
            time.sleep(RETRY_S)

    def _leave_memory(self, mooncake: Mooncake) -> None:
        keys, _, _ = self._storage._batch_preprocess(
            self._storage._tag_keys(self._names), self._places(range(len(self._names)))
        )
        mooncake.flush(self._storage.store, keys)
        self._storage = None
        mooncake.restart()
        self._open()
        # Its memory for what is read is faulted in by the first who reads.
        self.read()

    def _places(self, batch: range) -> torch.Tensor:
        return torch.arange(batch.start * PAGE, batch.stop * PAGE)

    def read(self) -> int:
        """Batch after batch, as the controller's prefetch thread."""
        self._hits = []
        for batch in self._batches():
            names = [self._names[it] for it in batch]
            if self._is_v1:
                came = self._storage.batch_get_v1(names, self._places(batch))
                self._hits += [number for number, hit in zip(batch, came, strict=True) if hit]
                continue
            pages = self._storage.batch_get(names, [self._pool.get_dummy_flat_data_page() for _ in batch])
            for number, page in zip(batch, pages, strict=True):
                if page is not None:
                    self._pool.set_from_flat_data_page(number * PAGE, page)
                    self._hits.append(number)
        return len(self._hits)

    def check(self) -> int:
        wrong = 0
        for number in self._hits:
            page = self._page(number)
            wrong += self._content.wrong_bytes(number, View(page))
            # Nothing of it is left for a later read to pass by.
            self._pool.set_from_flat_data_page(number * PAGE, page)
        self._hits = []
        return wrong

    def settle(self) -> int:
        engine = getattr(self._storage, "_engine", None)
        if engine is None:
            return 0
        before = -1
        while True:
            tiers = engine.stats()["tiers"]
            read = sum(tier["read_bytes"] for tier in tiers)
            if read == before:
                return read - sum(tier["payload_bytes"] for tier in tiers)
            before = read
            time.sleep(0.25)

    def close(self) -> None:
        close = getattr(self._storage, "close", None)
        if close is not None:
            close()
        if self._mooncake:
            self._mooncake.close()
