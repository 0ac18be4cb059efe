"""Whole steps, stores in the background, and look-ups that wait for nobody: what engines with a scheduler use."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import kvbraid
from harness import config, namespace, raises, run
from kvbraid import Engine, KeySpace

SPACE = KeySpace(namespace())
SIZE = 200_000
SOON = 30.0


def chunk(n: int) -> tuple[int, bytes]:
    return n % 3, hashlib.blake2b(n.to_bytes(8, "big"), digest_size=32).digest()


def payload(n: int, size: int = SIZE) -> bytes:
    return hashlib.shake_128(n.to_bytes(8, "big")).digest(size)


def written(directory: Path, count: int) -> list[kvbraid.Key]:
    """Chunks on both tiers, in no memory."""
    keys = SPACE.keys([chunk(n) for n in range(count)])
    with Engine(config(directory)) as engine:
        stage = engine.submit_store(keys, [payload(n) for n in range(count)], wait_s=SOON)
        assert stage.wait(SOON) and stage.results() == ["staged"] * count
        assert engine.flush(SOON)
    return keys


def test_many_keys_are_the_same_as_one_by_one() -> None:
    chunks = [chunk(n) for n in range(9)]
    assert SPACE.keys(chunks) == [SPACE.key(it, object_group=group) for group, it in chunks]
    assert SPACE.keys([]) == []
    raises(kvbraid.KeyError, "7 bytes", SPACE.keys, [(0, bytes(7))])
    raises(OverflowError, "", SPACE.keys, [(-1, bytes(32))])


def test_a_step_of_several_loads_is_read_as_one_from_both_tiers(directory: Path) -> None:
    keys = written(directory, 60)
    with Engine({**config(directory), "queue": {"memory": "96 MiB"}}) as engine:
        assert engine.contains(keys) == [True] * 60 and engine.seek(keys) is None
        parts = [(keys[:30], 0), (keys[20:], 20), ([], 0)]
        buffers = [[bytearray(SIZE) for _ in part] for part, _ in parts]
        fills = engine.submit_step([(part, some) for (part, _), some in zip(parts, buffers, strict=True)])
        for fill, (part, first), some in zip(fills, parts, buffers, strict=True):
            assert fill.wait(SOON) and fill.done and fill.hits() == [True] * len(part)
            assert [bytes(it) for it in some] == [payload(first + n) for n in range(len(part))]
            assert fill.hits() == [True] * len(part), "asked twice"
        stats = engine.stats()
        assert stats["steps"] == 1 and stats["wanted"] == 60, (stats["steps"], stats["wanted"])
        assert all(tier["hits"] > 0 for tier in stats["tiers"])
        assert engine.submit_step([]) == []


def test_a_step_larger_than_the_memory_for_it_is_filled_as_it_comes(directory: Path) -> None:
    keys = written(directory, 40)
    with Engine({**config(directory), "queue": {"memory": "4 MiB"}}) as engine:
        buffers = [bytearray(SIZE) for _ in keys]
        (fill,) = engine.submit_step([(keys, buffers)])
        assert fill.wait(SOON) and fill.hits() == [True] * 40
        assert [bytes(it) for it in buffers] == [payload(n) for n in range(40)]


def test_what_is_not_there_or_of_another_length_is_a_miss_and_written_nowhere(directory: Path) -> None:
    keys = written(directory, 2)
    absent = SPACE.keys([chunk(99)])
    with Engine(config(directory)) as engine:
        assert engine.contains(keys + absent) == [True, True, False]
        buffers = [bytearray(SIZE), bytearray(SIZE - 1), bytearray(SIZE)]
        (fill,) = engine.submit_step([(keys + absent, buffers)])
        assert fill.wait(SOON) and fill.hits() == [True, False, False]
        assert bytes(buffers[0]) == payload(0) and not any(buffers[1]) and not any(buffers[2])
        raises(kvbraid.SizeError, "1 keys and 0 buffers", engine.submit_step, [(absent, [])])
        raises(kvbraid.SizeError, "read-only", engine.submit_step, [(absent, [bytes(SIZE)])])
        raises(kvbraid.SizeError, "1 keys and 0 buffers", engine.submit_store, absent, [])


def test_a_step_that_is_dropped_writes_no_byte_afterwards(directory: Path) -> None:
    keys = written(directory, 60)
    with Engine(config(directory)) as engine:
        for _ in range(30):
            buffers = [bytearray(SIZE) for _ in keys]
            fills = engine.submit_step([(keys, buffers)])
            del fills
            # Resizing fails while anybody has the memory.
            for it in buffers:
                it.extend(b"x")
        (fill,) = engine.submit_step([(keys, buffers := [bytearray(SIZE) for _ in keys])])
        assert fill.wait(SOON) and all(fill.hits() or [False]) and bytes(buffers[59]) == payload(59)


def test_a_store_waits_for_room_or_is_refused(directory: Path) -> None:
    keys = SPACE.keys([chunk(n) for n in range(40)])
    small = config(directory, staging="4 MiB")
    with Engine(small) as engine:
        stage = engine.submit_store(keys, [payload(n) for n in range(40)], wait_s=SOON)
        assert stage.wait(SOON) and stage.results() == ["staged"] * 40
        assert engine.submit_store(keys[:1], [bytes(3)]).wait(SOON)
    held = config(directory / "held", staging="4 MiB", write_max_age_ms=60_000)
    with Engine(held) as engine:
        # Written behind a forward pass only, which does not come.
        engine.forward_ended()
        stage = engine.submit_store(keys, [payload(n) for n in range(40)])
        assert stage.wait(SOON)
        results = stage.results() or []
        assert "staged" in results and "staging_full" in results, results
        waiting = engine.submit_store(keys, [memory := bytearray(SIZE)] * 40, wait_s=3600)
        assert not waiting.wait(0.05)
        del waiting
        memory.extend(b"x")
        engine.forward_began()
        assert engine.flush(SOON)


def test_a_closed_engine_ends_what_is_under_way(directory: Path) -> None:
    keys = written(directory, 4)
    engine = Engine(config(directory))
    engine.forward_ended()
    (fill,) = engine.submit_step([(keys, [bytearray(SIZE) for _ in keys])])
    begun = time.monotonic()
    engine.close()
    assert fill.wait(SOON) and time.monotonic() - begun < SOON
    assert engine.closed
    for call in (engine.contains, engine.seek):
        raises(kvbraid.ClosedError, "closed", call, keys)
    raises(kvbraid.ClosedError, "closed", engine.submit_step, [])
    raises(kvbraid.ClosedError, "closed", engine.submit_store, keys[:1], [bytes(SIZE)])


def test_a_fork_is_told_and_touches_nothing(directory: Path) -> None:
    keys = written(directory, 4)
    with Engine(config(directory)) as engine:
        (fill,) = engine.submit_step([(keys, [bytearray(SIZE) for _ in keys])])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(30)
                raises(kvbraid.ForkedError, "parent", fill.hits)
                raises(kvbraid.ForkedError, "parent", engine.contains, keys)
                raises(kvbraid.ForkedError, "parent", engine.submit_step, [])
                del fill
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert fill.wait(SOON) and fill.hits() == [True] * 4


def test_a_chunk_larger_than_the_engine_takes_is_refused(directory: Path) -> None:
    with Engine(config(directory)) as engine:
        assert engine.chunk_bytes_max == 1 << 20
        stage = engine.submit_store(SPACE.keys([chunk(0)]), [bytes((1 << 20) + 1)], wait_s=SOON)
        assert stage.wait(SOON) and stage.results() == ["too_large"]


if __name__ == "__main__":
    run(globals())
