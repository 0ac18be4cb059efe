"""What the adapter costs the thread that calls it, and for how long no other Python thread runs meanwhile."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SWITCH_S = 0.0002
"""How soon a thread that wants the interpreter gets it, while it is measured who has it."""
WAIT_S = 60.0


class Memory:
    """As much of LMCache's memory object as an adapter uses."""

    def __init__(self, content: bytearray) -> None:
        self.byte_array = memoryview(content)

    def get_size(self) -> int:
        return self.byte_array.nbytes


class Counter(threading.Thread):
    """Counts as fast as it may: what it does not count, another thread has the interpreter."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.is_over = False
        self.ns_each = 0.0

    def run(self) -> None:
        while not self.is_over:
            self.count += 1

    def __enter__(self) -> Counter:
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self.start()
        best = float("inf")
        for _ in range(5):
            count, begun = self.count, time.perf_counter_ns()
            time.sleep(0.02)
            best = min(best, (time.perf_counter_ns() - begun) / max(1, self.count - count))
        self.ns_each = best
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self.join()
        sys.setswitchinterval(self._switch)


def measure(manager: Any, keys_wanted: int, reps: int) -> dict[str, Any]:
    """Microseconds of each repetition: calls that nothing disturbs, and of the same calls those with the interpreter held."""
    adapter, keys, size = manager.sample(keys_wanted)
    objects = [Memory(bytearray(size)) for _ in keys]
    poll = select.poll()
    poll.register(adapter.get_load_event_fd(), select.POLLIN)

    def look_up() -> int:
        return adapter.submit_lookup_and_lock_task(keys, {})

    def submit() -> int:
        return adapter.submit_load_task(keys, objects)

    def looked_up(task: int) -> None:
        bits = adapter.query_lookup_and_lock_result(task)
        assert bits.popcount() == len(keys), "chunks are missing"
        adapter.submit_unlock(keys)

    def loaded(task: int) -> None:
        end = time.monotonic() + WAIT_S
        while adapter.query_load_result(task) is None:
            assert time.monotonic() < end, "a load does not end"
            poll.poll(100)

    found: dict[str, Any] = {"keys": len(keys)}
    for name, call, after, turns in (("look_up", look_up, looked_up, reps), ("submit", submit, loaded, max(5, reps // 20))):
        found[name + "_us"] = [it / 1e3 for it in timed(call, after, turns)]
        with Counter() as counter:
            found[name + "_held_us"] = [it / 1e3 for it in timed(call, after, turns, counter)]
    return found


def timed(
    call: Callable[[], int], after: Callable[[int], None], turns: int, counter: Counter | None = None
) -> list[float]:
    """Nanoseconds of each call; with a counter, without the time in which that had the interpreter."""
    found = []
    for _ in range(turns):
        counted, begun = counter.count if counter else 0, time.perf_counter_ns()
        task = call()
        took = float(time.perf_counter_ns() - begun)
        if counter:
            took = max(0.0, took - (counter.count - counted) * counter.ns_each)
        found.append(took)
        after(task)
    return found
