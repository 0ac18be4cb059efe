"""What an adapter makes of marks: when the engine's gate opens for writes, and when a step is whole.

A step cannot be closed when its mark comes. LMCache's scheduler side does not wait for its look-ups; the server hashes
their tokens on a pool of threads, and one thread of it then asks adapters, plans, and submits the loads: at the time of
the mark most are still to come, and with several threads in any order. So the mark says only *how many* requests were
looked up, and the step is whole when so many look-ups were answered here and no load is still to follow from them. It
is exact while all look-ups that reach this adapter are counted by marks: one vLLM, or several that all mark. Else
a step ends early, or as without marks after `[queue] gather_us`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from kvbraid import Engine, Error
from kvbraid.lmcache_steps.mark import Mark

LAPSED_S = 10.0
"""A sender that is silent for so long is gone."""
STALE_S = 0.5
"""A step that is not whole by then is given up: its look-ups ended on the way, or were not those that were counted."""
SENDERS_MAX = 256


@dataclass(slots=True)
class _Sender:
    number: int
    forward: bool
    heard_at: float


class Steps:
    """Of one adapter. Any thread; nothing in here blocks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._marks = self._refused = self._closed = 0
        self._is_held = False
        """Whether the engine was told that no forward pass runs."""
        self._expected = self._answered = self._undecided = 0
        self._begun_at = 0.0

    def mark(self, mark: Mark) -> bool:
        """Whether it was taken; only one of too many senders is not."""
        now = time.monotonic()
        with self._lock:
            self._drop_lapsed(now)
            known = self._senders.get(mark.sender)
            if known is None and len(self._senders) >= SENDERS_MAX:
                self._refused += 1
                return False
            self._marks += 1
            if known is None or mark.number > known.number:
                if mark.forward is None:
                    self._senders.pop(mark.sender, None)
                else:
                    self._senders[mark.sender] = _Sender(mark.number, mark.forward, now)
                self._set_gate()
            if mark.lookups:
                self._freshen(now)
                self._expected += mark.lookups
                self._close_if_whole()
        return True

    def storing(self) -> None:
        """A store comes: it does not wait for the forward passes of senders that are gone."""
        if self._is_held:
            with self._lock:
                self._drop_lapsed(time.monotonic())
                self._set_gate()

    # LMCache's one thread takes the answer of a look-up, unlocks what it does not want from here, and submits one load for
    # the rest, before it takes the next answer (with several L2 adapters: when it has all answers of the request).

    def answered(self, hits: int) -> None:
        """LMCache has taken the answer of a look-up that found so many chunks."""
        with self._lock:
            self._freshen(time.monotonic())
            self._answered += 1
            self._undecided += hits
            self._close_if_whole()

    def unlocked(self, keys: int) -> None:
        """LMCache has unlocked chunks: those that it does not want, or has loaded."""
        self._decided(keys)

    def submitted(self, keys: int) -> None:
        """LMCache has submitted a load of so many chunks."""
        self._decided(keys)

    def report(self) -> dict[str, Any]:
        """For `/status`."""
        with self._lock:
            running = sum(it.forward for it in self._senders.values())
            senders = {"senders": len(self._senders), "forward_passes": running}
            return {"marks": self._marks, "refused": self._refused, "steps_closed": self._closed, **senders}

    def _decided(self, keys: int) -> None:
        # Without the lock: but for marks, all this is called by one thread.
        if self._undecided:
            with self._lock:
                self._undecided = max(0, self._undecided - keys)
                self._close_if_whole()

    def _close_if_whole(self) -> None:
        if 0 < self._expected <= self._answered and not self._undecided:
            self._expected = self._answered = 0
            self._closed += 1
            self._say("end_step")

    def _freshen(self, now: float) -> None:
        """Begins to count anew if what was counted is of a step that never became whole."""
        if now > self._begun_at + STALE_S:
            self._expected = self._answered = self._undecided = 0
        if not self._expected and not self._answered:
            self._begun_at = now

    def _drop_lapsed(self, now: float) -> None:
        for name in [name for name, it in self._senders.items() if now > it.heard_at + LAPSED_S]:
            del self._senders[name]

    def _set_gate(self) -> None:
        """Writes wait while there is a sender and none of them computes."""
        is_held = bool(self._senders) and not any(it.forward for it in self._senders.values())
        if is_held != self._is_held:
            self._is_held = is_held
            self._say("forward_ended" if is_held else "forward_began")

    def _say(self, what: str) -> None:
        try:
            getattr(self._engine, what)()
        except Error:
            pass  # closed
