"""Names and places of vLLM's chunks: keys of the engine, and rows of the primary tier's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from kvbraid import Key, KeySpace


class Chunks:
    """Translates what vLLM calls a chunk."""

    def __init__(self, namespace: dict[str, Any], primary: memoryview, chunk_bytes: int) -> None:
        self._space = KeySpace(namespace)
        self._memory: memoryview | None = primary.cast("B")
        self.chunk_bytes = chunk_bytes

    def keys(self, keys: Iterable[OffloadKey]) -> list[Key]:
        """The engine's keys. The hash goes on from the request's beginning, its salt and its adapter's name included."""
        return self._space.keys([(get_offload_group_idx(key), get_offload_block_hash(key)) for key in keys])

    def rows(self, places: Sequence[int]) -> list[memoryview]:
        """The memory of these slots of the primary tier."""
        if self._memory is None:
            raise ValueError("the primary tier's memory was given back")
        size = self.chunk_bytes
        return [self._memory[place * size : (place + 1) * size] for place in map(int, places)]

    def release(self) -> None:
        """Gives the memory back: vLLM unmaps it next."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None
