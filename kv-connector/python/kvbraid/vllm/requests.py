"""What is remembered of a request, as long as vLLM has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvbraid import Seek

_BATCH = 8
_BATCH_MAX = 512
_ASKED = 64
"""Files of a shared directory that are looked for at a time."""


@dataclass
class Request:
    """Kept in vLLM's own context of the request, and gone with it."""

    failed: set[OffloadKey] = field(default_factory=set)
    """Chunks that could not be loaded for it: from then on misses, or it would wait for them for ever."""
    sought: dict[OffloadKey, Seek | None] = field(default_factory=dict)
    """Chunks that tiers of other nodes were asked about for it."""
    _order: list[OffloadKey] = field(default_factory=list)
    _place: dict[OffloadKey, int] = field(default_factory=dict)
    _next: int = -1
    _size: int = 1

    @staticmethod
    def of(context: ReqContext) -> Request:
        """That of this context; made if there is none."""
        found = context.get_state(Request)
        if found is None:
            found = Request()
            context.set_state(found)
        return found

    def batch(self, key: OffloadKey, context: ReqContext) -> list[OffloadKey]:
        """`key` and some that vLLM will ask for next: more each time it does, since it stops at the first miss."""
        positions = getattr(context, "_offload_key_positions", {})
        if len(positions) != len(self._order):
            self._order = list(positions)
            self._place = {it: place for place, it in enumerate(self._order)}
        place = self._place.get(key)
        if place is None:
            return [key]
        self._size = min(self._size * _BATCH, _BATCH_MAX) if place == self._next else 1
        keys = self._order[place : place + self._size]
        self._next = place + len(keys)
        return keys

    def following(self, key: OffloadKey) -> list[OffloadKey]:
        """`key` and those after it, some."""
        place = self._place.get(key)
        return [key] if place is None else self._order[place : place + _ASKED]
