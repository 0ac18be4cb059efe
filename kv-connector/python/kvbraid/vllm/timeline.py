"""When requests that wait will read their chunks, projected from those that run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILE = 0.3
"""Of the lengths of outputs: use begins when the first of several requests ends, so a mean would come too late."""
_HISTORY = 64
_WEIGHT = 0.2


@dataclass(frozen=True)
class Work:
    """What is left of one request."""

    request: str
    prompt_tokens: int
    """Still to be computed."""
    output_tokens: int
    """Made so far."""
    output_max: int
    """The most it may make."""
    chunks: int = 0
    """To be read before it can run."""


class Timeline:
    """Costs learned from the steps so far, and what follows from them."""

    def __init__(self, slots: int, chunks_above: int) -> None:
        """`slots` requests run at once; `chunks_above` fit in the memory that chunks are read into."""
        self._slots = slots
        self._chunks_above = chunks_above
        self._outputs: deque[int] = deque(maxlen=_HISTORY)
        self._step_s: float | None = None
        self._token_s: float | None = None

    def stepped(self, seconds: float, tokens: int, requests: int) -> None:
        """A step took so long for so many tokens of so many requests."""
        if tokens <= requests:
            self._step_s = _smoothed(self._step_s, seconds)
        elif self._step_s is None:
            self._token_s = _smoothed(self._token_s, seconds / tokens)
        else:
            self._token_s = _smoothed(self._token_s, max(0.0, seconds - self._step_s) / tokens)

    def finished(self, output_tokens: int) -> None:
        """A request ended by itself after so many."""
        self._outputs.append(output_tokens)

    def project(self, running: Sequence[Work], waiting: Sequence[Work]) -> dict[str, float]:
        """Seconds until each of `waiting`, in their order, begins to read.

        vLLM looks all of them up as soon as it could run one more, and begins to read as much as there is memory for; what
        finds none waits for its turn.
        """
        ends = [self._seconds(work) for work in running]
        heapq.heapify(ends)
        free = self._slots - len(ends)
        times: dict[str, float] = {}
        first: float | None = None
        chunks = 0
        for work in waiting:
            start = 0.0 if free > 0 or not ends else heapq.heappop(ends)
            free -= 1
            heapq.heappush(ends, start + self._seconds(work))
            first = start if first is None else first
            chunks += work.chunks
            times[work.request] = first if chunks <= self._chunks_above else start
        return times

    def _seconds(self, work: Work) -> float:
        prefill = work.prompt_tokens * (self._token_s or 0.0)
        return prefill + self._left(work) * (self._step_s or 0.0)

    def _left(self, work: Work) -> int:
        """Tokens still to come, by the outputs that were at least as long. Older than any: it may end at any moment."""
        longer = sorted(length for length in self._outputs if length > work.output_tokens)
        most = max(0, work.output_max - work.output_tokens)
        if not longer:
            return 0 if self._outputs else most
        return min(most, longer[int(QUANTILE * (len(longer) - 1))] - work.output_tokens)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
