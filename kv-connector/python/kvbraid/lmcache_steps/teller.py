"""Sends marks, and sends none where nobody hears them."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from kvbraid.lmcache_steps.mark import METHOD, TAKEN, Mark

if TYPE_CHECKING:
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.kvbraid")

AHEAD_MAX = 64
"""Steps that were scheduled and have not run; vLLM has one or two, and one more for each pipeline stage."""

OPEN_MAX = 128
"""Marks on their way; to a server that is away LMCache queues a thousand requests, then it blocks. Before the first answer
it is one: a server without our module never answers, and LMCache keeps a request for ever."""
ANSWER_S = 5.0
"""A mark that is not answered by then is not heard."""
SILENT_S = 5.0
"""How long nothing is sent to a server that does not hear; doubled each time."""
SILENT_MAX_S = 600.0
AGAIN_S = 1.0
"""A state that lasts is told again after this: a mark may be lost, and a sender that is silent is taken for gone."""


class Teller:
    """One scheduler's marks for one server. Nothing in here blocks. One thread."""

    def __init__(self, client: Any, server: str) -> None:
        self._client = client
        self._server = server
        self._sender = uuid.uuid4().hex
        self._number = 0
        self._open: deque[tuple[Any, float]] = deque()
        self._is_heard = False
        self._told: bool | None = None
        self._told_at = 0.0
        self._silent_until = 0.0
        self._silent_s = SILENT_S

    def tell(self, forward: bool, lookups: int = 0) -> None:
        """Whether a forward pass runs, and how many were looked up. What was told already is not told again."""
        now = time.monotonic()
        self._hear(now)
        if not lookups and forward == self._told and now < self._told_at + AGAIN_S:
            return
        if now < self._silent_until or len(self._open) >= (OPEN_MAX if self._is_heard else 1):
            return
        self._send(forward, lookups, now)
        self._told, self._told_at = forward, now

    def leave(self) -> None:
        """Says that no more marks will come."""
        if self._is_heard:
            self._send(None, 0, time.monotonic())
            self._silent_until = float("inf")

    def _send(self, forward: bool | None, lookups: int, now: float) -> None:
        self._number += 1
        mark = Mark(self._sender, self._number, forward, lookups)
        self._open.append((self._client.server_module_call(ServerModuleCallRequest(METHOD, mark.encode())), now))

    def _hear(self, now: float) -> None:
        """Takes the answers that have come."""
        while self._open:
            future, sent_at = self._open[0]
            if future.query():
                self._open.popleft()
                why = _refusal(future)
                if why:
                    self._fall_silent(now, why)
                elif not self._is_heard:
                    self._is_heard, self._silent_s = True, SILENT_S
            elif now > sent_at + ANSWER_S:
                self._fall_silent(now, "no answer")
            else:
                return

    def _fall_silent(self, now: float, why: str) -> None:
        is_new = self._is_heard or self._number == 1
        _log.log(
            logging.WARNING if is_new else logging.DEBUG,
            "KVBraid: LMCache's server %s does not take marks of steps and forward passes: %s. Everything goes on without; "
            "they take --server-module kvbraid.lmcache_steps.server",
            self._server,
            why,
        )
        self._open.clear()
        self._is_heard, self._told = False, None
        self._silent_until = now + self._silent_s
        self._silent_s = min(2 * self._silent_s, SILENT_MAX_S)


def _refusal(future: Any) -> str:
    """Why a mark was not taken; empty if it was."""
    try:
        answer = future.result(timeout=0)
    except Exception as error:  # of whatever transport
        return f"{type(error).__name__}: {error}"
    if answer is None or not answer.success:
        return getattr(answer, "error", "") or "no answer"
    return "" if answer.payload == TAKEN else answer.payload.decode(errors="replace")

class Marks:
    """What the scheduler does, as marks for each server."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._tellers = [Teller(client, url) for url, client in adapter.req_clients.items()]
        self._ahead: deque[bool] = deque(maxlen=AHEAD_MAX)
        """Whether each of the steps that have not run yet has a forward pass."""
        self._asked: set[str] = set()
        """Requests whose look-ups are on their way."""
        self._lookups = 0

    def asked(self, request: Request, matched: int | None) -> None:
        """A request was looked up, or asked after; without an answer yet if nothing matched is known."""
        name = request.request_id
        if matched is not None:
            self._asked.discard(name)
        elif name not in self._asked:
            self._asked.add(name)
            # Of fewer tokens than a chunk's the server looks nothing up.
            self._lookups += request.num_tokens >= self._adapter.lmcache_tokens_per_chunk

    def scheduled(self, is_forward: bool) -> None:
        """A scheduling pass has ended; it has a forward pass or not."""
        self._ahead.append(is_forward)
        lookups, self._lookups = self._lookups, 0
        self._tell(lookups)

    def ran(self) -> None:
        """The oldest step has run."""
        if self._ahead:
            self._ahead.popleft()
        self._tell(0)

    def ended(self, request: Request) -> None:
        """Finished, or aborted in whatever state."""
        self._asked.discard(request.request_id)

    def leave(self) -> None:
        """vLLM shuts down."""
        for it in self._tellers:
            it.leave()

    def _tell(self, lookups: int) -> None:
        # To a server that is away LMCache's queue is bounded, and then blocks.
        if self._adapter.is_healthy:
            is_forward = any(self._ahead)
            for it in self._tellers:
                it.tell(is_forward, lookups)
