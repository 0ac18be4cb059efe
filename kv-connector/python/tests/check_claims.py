"""Claims through the wheel: recorded, revised, cancelled, and ended by the load that reads what they name."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import kvbraid
from harness import namespace, raises, run
from kvbraid import Engine, KeySpace

SPACE = KeySpace(namespace())
SIZE = 300_000
LATER_S = 3600.0


def keys(count: int) -> list[kvbraid.Key]:
    return [SPACE.key(hashlib.blake2b(n.to_bytes(8, "big"), digest_size=32).digest()) for n in range(count)]


def payload(n: int) -> bytes:
    return hashlib.shake_128(n.to_bytes(8, "big")).digest(SIZE)


def opened(directory: Path, count: int = 12) -> Engine:
    tier: dict[str, Any] = {"name": "f", "kind": "flash", "path": str(directory / "flash"), "capacity": "64 MiB"}
    tier["flash"] = {"margin_ms": 5000}
    engine = Engine(
        {
            "engine": {"chunk_bytes_max": "1 MiB", "host_cache": "0", "staging": "16 MiB", "cache_stores": False},
            "tier": [tier],
        }
    )
    assert engine.store(keys(count), [payload(n) for n in range(count)]) == ["staged"] * count
    assert engine.flush(30.0)
    return engine


def claims(engine: Engine) -> dict[str, Any]:
    return engine.stats()["tiers"][0]["claims"]


def until(engine: Engine, **wanted: int | str) -> dict[str, Any]:
    """Waits for these counters; a word of `states` counts as one."""
    end = time.monotonic() + 30.0
    while True:
        found = claims(engine)
        flat = {**found, **found["states"]}
        if all(flat[name] == count for name, count in wanted.items()):
            return found
        assert time.monotonic() < end, (wanted, found)
        time.sleep(0.005)


def load(engine: Engine, count: int) -> None:
    buffers = [bytearray(SIZE) for _ in range(count)]
    fetch = engine.submit_load(keys(count), buffers)
    end = time.monotonic() + 30.0
    while (hits := fetch.take()) is None:
        assert time.monotonic() < end, "the load does not end"
        fetch.wait(1.0)
    assert hits == [True] * count and [bytes(it) for it in buffers] == [payload(n) for n in range(count)]


def test_a_claim_is_staged_when_its_time_comes_and_ended_by_its_load(directory: Path) -> None:
    with opened(directory) as engine:
        assert engine.claim("r", keys(8), LATER_S) == 8
        assert claims(engine)["protected_bytes"] == 0 and until(engine, recorded=1)["staged_chunks"] == 0
        assert engine.revise({"r": 0.0, "nobody": 1.0}) == 1
        assert until(engine, ready=1)["reserved_bytes"] >= 8 * SIZE
        load(engine, 8)
        found = until(engine, released=1, protected_bytes=0)
        assert (found["early"], found["late"], found["protected_chunks"]) == (1, 0, 8)


def test_a_schedule_says_when_claims_are_used(directory: Path) -> None:
    with opened(directory) as engine:
        assert claims(engine)["use_by"] == "times"
        running, waiting = ("a", 0, 10, None), [("r", 40, 0, 100), ("other", 40, 0, None)]
        engine.claim("r", keys(8), LATER_S)
        named = engine.schedule([running], waiting, slots=1, iteration_s=1.0, prompt_token_s=0.001, ended=[500, 500])
        assert named == 1
        until(engine, use_by="tokens", schedules=1)
        time.sleep(0.1)
        assert until(engine, recorded=1)["staged_chunks"] == 0
        # A second is left: less than the margin.
        engine.schedule([("a", 0, 499, None)], waiting, slots=1, iteration_s=1.0, read_ahead=2)
        until(engine, ready=1, schedules=2)
        load(engine, 8)
        assert until(engine, released=1)["protected_chunks"] == 8
        raises(ValueError, "tuple of length 4", engine.schedule, [("a", 0, 500)], [], slots=1, iteration_s=1.0)
        assert engine.schedule([], [], slots=0, iteration_s=-1.0) == 0


def test_what_is_not_staged_is_read_all_the_same(directory: Path) -> None:
    with opened(directory) as engine:
        engine.claim("r", keys(4), LATER_S)
        load(engine, 4)
        assert until(engine, released=1)["demand_chunks"] == 4


def test_a_cancelled_claim_holds_nothing(directory: Path) -> None:
    with opened(directory) as engine:
        engine.claim("r", keys(4), 0.0)
        until(engine, ready=1)
        assert engine.cancel("r") is True and engine.cancel("r") is False
        until(engine, cancelled=1, protected_bytes=0, reserved_bytes=0)
        assert engine.claim("r", [], 0.0) == 0
        # The time may be left open, and be absurd.
        assert engine.claim("r", keys(2)) == 2
        assert engine.revise({"r": None}) == engine.revise({"r": -1.0}) == engine.revise({"r": 1e300}) == 1


def test_wrong_arguments_and_a_closed_engine_are_told(directory: Path) -> None:
    engine = opened(directory)
    raises(TypeError, "", engine.claim, 7, keys(1))
    raises(TypeError, "", engine.revise, {"r": "soon"})
    engine.claim("r", keys(4), 0.0)
    engine.close()
    for call in (
        lambda: engine.claim("r", keys(1)),
        lambda: engine.revise({"r": 1.0}),
        lambda: engine.schedule([], [], slots=1, iteration_s=1.0),
        lambda: engine.cancel("r"),
    ):
        raises(kvbraid.ClosedError, "closed", call)
    assert locked(directory) == []


def locked(directory: Path) -> list[str]:
    """Lines of mappings of the store that say something is locked."""
    lines, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = str(directory) in line
        if ours and line.startswith("Locked:") and not line.split()[1] == "0":
            lines.append(line)
    return lines


def test_a_fork_touches_no_claim(directory: Path) -> None:
    with opened(directory) as engine:
        engine.claim("r", keys(4), LATER_S)
        pid = os.fork()
        if pid == 0:
            try:
                engine.cancel("r")
            except kvbraid.ForkedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert engine.cancel("r")


if __name__ == "__main__":
    run(globals())
