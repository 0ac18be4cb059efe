"""Pages of SGLang's host pools as chunks: their keys, and where their bytes lie.

A page of a host pool lies in as many places as it has layers, in most layouts. They are cut from the pool's own memory,
in ascending order, which is the order of SGLang's flat pages: both of its interfaces read what the other has written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbraid import ConfigError, Key, KeySpace, Page, Region


@dataclass(frozen=True)
class Ranks:
    """Which part of the model's KV this process has."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dcp_rank: int
    dcp_size: int
    is_replicated: bool

    @classmethod
    def of(cls, config: Any) -> Ranks:
        tp, pp, cp = (config.tp_rank, config.tp_size), (config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)
        return cls(*tp, *pp, *cp, config.dcp_rank, config.dcp_size, config.is_mla_model)

    def kv_rank(self, is_replicated: bool) -> int:
        """What chunks of different ranks differ in; the ranks of an MLA model hold the same bytes."""
        part = self.dcp_rank if is_replicated else self.tp_rank
        return self.pp_rank << 24 | self.cp_rank << 12 | part

    def namespace(self, is_replicated: bool) -> dict[str, int]:
        return {
            "tensor_parallel": 1 if is_replicated else self.tp_size,
            "pipeline_parallel": self.pp_size,
            "context_parallel": self.cp_size * self.dcp_size,
        }


class Pages:
    """The pages of one host pool."""

    def __init__(self, pool: Any, name: str, ranks: Ranks, identity: dict[str, Any]) -> None:
        self.pool = pool
        self.tokens = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 0) or 1)
        self.page_bytes, self._region = _page_bytes(pool, self.tokens)
        # The state of linear attention is split among ranks in every model.
        is_replicated = ranks.is_replicated and name != "mamba"
        self._kv_rank = ranks.kv_rank(is_replicated)
        names = ("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "storage_format_tag")
        shape = ",".join(f"{it}={getattr(pool, it, None)}" for it in names)
        self.namespace = {
            "dtype": str(getattr(pool, "dtype", "none")).removeprefix("torch."),
            "layout": str(getattr(pool, "layout", "none")),
            "chunk_tokens": self.tokens,
            "serde": "raw",
            "hash_algorithm": "sha256",
            "hash_seed": "none",
            "engine": "sglang",
            "engine_major": 0,
            **ranks.namespace(is_replicated),
        }
        extra = {"sglang.pool": name, "sglang.page": f"bytes={self.page_bytes},{shape}", **identity.get("extra", {})}
        self._space = KeySpace({**self.namespace, **identity, "extra": extra})

    def keys(self, names: Sequence[str]) -> list[Key]:
        return [self._space.key(_digest(name), kv_rank=self._kv_rank) for name in names]

    def fits(self, names: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Whether there is a place in the pool for each page."""
        return indices is not None and indices.numel() == len(names) * self.tokens

    def sources(self, indices: torch.Tensor) -> list[Any]:
        """What pages are stored from."""
        if self._region is not None:
            return self._cut(indices)
        return [byte_view(self.pool.get_data_page(index, flat=True).contiguous()) for index in self._firsts(indices)]

    def targets(self, indices: torch.Tensor) -> tuple[list[Any], Callable[[int], None]]:
        """What pages are loaded into, and what is to be called for each that has arrived."""
        if self._region is not None:
            return self._cut(indices), lambda _: None
        firsts = self._firsts(indices)
        flat = [self.pool.get_dummy_flat_data_page() for _ in firsts]
        return [byte_view(page) for page in flat], lambda place: self.pool.set_from_flat_data_page(firsts[place], flat[place])

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        return [int(index) for index in indices[:: self.tokens].tolist()]

    def _cut(self, indices: torch.Tensor) -> list[Page]:
        addresses, sizes = _meta(self.pool, indices)
        assert self._region is not None
        return self._region.pages(addresses, sizes, indices.numel() // self.tokens)


def byte_view(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the host; no copy."""
    return tensor.view(torch.uint8).numpy()


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _meta(pool: Any, indices: torch.Tensor) -> tuple[list[int], list[int]]:
    addresses, sizes = pool.get_page_buffer_meta(indices)
    return addresses, [sizes] * len(addresses) if isinstance(sizes, int) else sizes


def _page_bytes(pool: Any, tokens: int) -> tuple[int, Region | None]:
    """The size of a page, and the pool's memory if pages can be cut from it."""
    try:
        region = Region(byte_view(pool.kv_buffer))
        addresses, sizes = _meta(pool, torch.arange(tokens, dtype=torch.int64))
        return len(region.pages(addresses, sizes, 1)[0]), region
    except Exception:
        pass
    try:
        flat = pool.get_dummy_flat_data_page()
        pool.get_data_page(0, flat=True)
        return flat.numel() * flat.element_size(), None
    except Exception as error:
        layout = getattr(pool, "layout", "none")
        raise ConfigError(
            f"hicache_mem_layout: pages of {type(pool).__name__} with layout {layout} cannot be stored ({error}); "
            "start SGLang with --hicache-mem-layout page_first or layer_first"
        ) from error
