"""Look-ups: one chunk a call, thousands a step, on the scheduler's thread. Answered from memory, many at a time."""

from __future__ import annotations

import logging

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvbraid import Engine, Error
from kvbraid.vllm.chunks import Chunks
from kvbraid.vllm.requests import Request

_log = logging.getLogger("vllm.kvbraid")


class Lookups:
    """Which chunks can be loaded."""

    def __init__(self, engine: Engine, chunks: Chunks) -> None:
        self._engine = engine
        self._chunks = chunks
        self._known: dict[OffloadKey, bool] = {}

    def lookup(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """RETRY only while tiers that other nodes write into are asked, for `engine.lookup_wait_ms` at most."""
        try:
            return self._lookup(key, context)
        except Error as error:
            _log.warning("KVBraid: a look-up failed, a miss: %s", error)
            return LookupResult.MISS

    def _lookup(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        request = Request.of(context)
        if key in request.failed:
            return LookupResult.MISS
        hit = self._known.get(key)
        if hit is None:
            some = request.batch(key, context)
            self._known.update(zip(some, self._engine.contains(self._chunks.keys(some)), strict=True))
            hit = self._known[key]
        if hit:
            return LookupResult.HIT
        return self._seek(key, request)

    def _seek(self, key: OffloadKey, request: Request) -> LookupResult:
        if key not in request.sought:
            # vLLM goes on to the next ones while this one is not known.
            some = [it for it in request.following(key) if it not in request.sought and not self._known.get(it)]
            seek = self._engine.seek(self._chunks.keys(some))
            request.sought.update(dict.fromkeys(some, seek))
        seek = request.sought[key]
        if seek is None:
            return LookupResult.MISS
        if not seek.done:
            return LookupResult.RETRY
        # Found by now, or nowhere.
        request.sought[key] = None
        self._known[key] = hit = self._engine.contains(self._chunks.keys([key]))[0]
        return LookupResult.HIT if hit else LookupResult.MISS

    def end_step(self) -> None:
        """What is known holds for one step."""
        self._known.clear()
