"""The wheel as a hostile user would use it: clear errors, no crash, no wrong byte."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kvbraid
from harness import config, namespace, raises, run
from kvbraid import Engine, KeySpace, Region

SPACE = KeySpace(namespace())


def key(n: int, **other: object) -> kvbraid.Key:
    return SPACE.key(hashlib.blake2b(n.to_bytes(8, "big"), digest_size=32).digest(), **other)


def payload(n: int, size: int = 300_000) -> bytes:
    return hashlib.shake_128(n.to_bytes(8, "big")).digest(size)


def taken(load: kvbraid.Load, limit_s: float = 30.0) -> list[bool]:
    end = time.monotonic() + limit_s
    while (hits := load.take()) is None:
        assert time.monotonic() < end, "the load does not end"
        load.wait(1.0)
    return hits


def fetch(engine: Engine, keys: list[kvbraid.Key], size: int = 300_000) -> tuple[list[bool], list[bytearray]]:
    buffers = [bytearray(size) for _ in keys]
    return taken(engine.submit_load(keys, buffers)), buffers


def in_child(child: object) -> None:
    """Runs `child` in a fork, which must end by itself with success."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(30)
            child()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"


def test_what_is_stored_comes_back_from_both_tiers_after_a_restart(directory: Path) -> None:
    count = 60
    keys = [key(n) for n in range(count)]
    with Engine(config(directory)) as engine:
        assert set(engine.store(keys, [payload(n) for n in range(count)])) == {"staged"}
        assert all(engine.lookup(keys)) and engine.flush(30)
        assert engine.store(keys[:1], [payload(0)]) == ["held"]
    with Engine(config(directory)) as engine:
        hits, buffers = fetch(engine, keys)
        assert all(hits)
        assert [bytes(it) for it in buffers] == [payload(n) for n in range(count)]
        stats = engine.stats()
        assert stats["hits"] == count and all(tier["hits"] > 0 for tier in stats["tiers"]), stats["tiers"]


def test_an_engine_opens_from_a_path_from_text_and_from_a_dict(directory: Path) -> None:
    text = '[engine]\nhost_cache = "16 MiB"\nstaging = "16 MiB"\n[[tier]]\nname = "m"\nkind = "memory"\ncapacity = "32 MiB"\n'
    path = directory / "kvbraid.toml"
    path.write_text(text)
    for source in (text, path, str(path)):
        with Engine(source) as engine:
            assert engine.namespace is None and not engine.persistent
    with Engine(config(directory)) as engine:
        assert engine.persistent and engine.namespace["model"] == namespace()["model"]
    # Paths as a system may have them, also within a dict.
    whole = config(directory)
    whole["tier"][0]["path"] = directory / "fast"
    Engine(whole).close()
    for name in ("a[1].toml", "two\nlines.toml", os.fsdecode(b"\xff.toml")):
        (directory / name).write_text(text)
        Engine(str(directory / name)).close()
    raises(kvbraid.ConfigError, "b[1].toml", Engine, str(directory / "b[1].toml"))
    raises(TypeError, "PathLike", Engine, {"engine": {"socket": object()}})


def test_bad_configurations_name_the_field(directory: Path) -> None:
    raises(kvbraid.ConfigError, "kvbraid.toml", Engine, directory / "kvbraid.toml")
    raises(kvbraid.ConfigError, "tier", Engine, {"engine": {}})
    raises(kvbraid.ConfigError, "chunk_bytes_max", Engine, config(directory, chunk="1 B"))
    raises(kvbraid.ConfigError, "staging_", Engine, config(directory, staging_="1 MiB"))
    raises(kvbraid.ConfigError, "queue.memory", Engine, {**config(directory), "queue": {"memory": "1 B"}})
    raises(TypeError, "config", Engine, 7)
    raises(kvbraid.ConfigError, "weights", KeySpace, {it: value for it, value in namespace().items() if it != "weights"})
    raises(kvbraid.ConfigError, "weights", KeySpace, namespace(weights=" "))
    raises(kvbraid.ConfigError, "chunk_tokens", KeySpace, namespace(chunk_tokens=0))
    with Engine(config(directory)):
        raises(kvbraid.OpenError, "", Engine, config(directory))


def test_odd_keys_are_refused_or_kept_apart(directory: Path) -> None:
    for size in (0, 7, 65, 1 << 20):
        raises(kvbraid.KeyError, f"{size} bytes", SPACE.key, bytes(size))
    raises(kvbraid.KeyError, "", SPACE.key, bytes(32), salt="x" * 100_000)
    raises(OverflowError, "", SPACE.key, bytes(32), kv_rank=-1)
    raises(OverflowError, "", SPACE.key, bytes(32), object_group=1 << 32)
    raises(TypeError, "salt", SPACE.key, bytes(32), salt=7)
    raises(TypeError, "", SPACE.key, "text")
    odd = ["", "\0", "@/\\", "\u00e9\U0001f600", b"\xff\x00\xfe", "a" * 128]
    keys = [SPACE.key(bytes(range(32)), salt=salt) for salt in odd]
    keys += [SPACE.key(bytes(range(32)), kv_rank=1), SPACE.key(bytes(range(32)), object_group=1)]
    keys.append(KeySpace(namespace(dtype="float16")).key(bytes(range(32))))
    assert len(set(keys)) == len(keys) and len({it.digest for it in keys}) == len(keys)
    assert keys[0] == SPACE.key(bytes(range(32))) and keys[0] != 7
    with Engine(config(directory)) as engine:
        for n, it in enumerate(keys):
            assert not engine.lookup([it])[0]
            engine.store([it], [payload(n)])
        hits, buffers = fetch(engine, keys)
        assert all(hits) and [bytes(it) for it in buffers] == [payload(n) for n in range(len(keys))]


def test_wrong_buffers_are_refused_and_stay_as_they_are(directory: Path) -> None:
    with Engine(config(directory)) as engine:
        engine.store([key(1)], [payload(1)])
        for size in (0, 1, 299_999, 300_001, 1 << 20, 3 << 20):
            hits, buffers = fetch(engine, [key(1)], size)
            assert hits == [False] and bytes(buffers[0]) == bytes(size), size
        raises(kvbraid.SizeError, "read-only", engine.submit_load, [key(1)], [bytes(300_000)])
        raises(kvbraid.SizeError, "one piece", engine.submit_load, [key(1)], [memoryview(bytearray(600_000))[::2]])
        raises(kvbraid.SizeError, "1 keys and 2", engine.submit_load, [key(1)], [bytearray(1), bytearray(1)])
        raises(kvbraid.SizeError, "1 keys and 0", engine.store, [key(1)], [])
        raises(kvbraid.SizeError, "ranks", engine.submit_load, [key(1)], [bytearray(1)], [1, 2])
        raises(TypeError, "", engine.submit_load, [key(1)], [7])
        memory = (ctypes.c_ubyte * 300_000)()  # which has a buffer without strides
        assert taken(engine.submit_load([key(1)], [memory])) == [True] and bytes(memory) == payload(1)
        assert engine.store([key(8)], [memory]) == ["staged"]
        raises(TypeError, "", engine.lookup, [b"no key"])
        memory = memoryview(bytearray(600_000))
        for one, other in ((memory[:300_000], memory[299_999:]), (memory[300_000:], memory[1:300_001]), (memory, memory)):
            raises(kvbraid.SizeError, "buffers 0 and 1 overlap", engine.submit_load, [key(1), key(2)], [one, other])
            raises(kvbraid.SizeError, "buffers 0 and 1 overlap", engine.submit_step, [([key(1)], [one]), ([key(2)], [other])])
        assert taken(engine.submit_load([key(1)] * 2, [memory[:300_000], memory[300_000:]])) == [True, True]
        assert engine.store([key(2)], [bytes((1 << 20) + 1)]) == ["too_large"]
        assert engine.store([key(3)], [b""])[0] in ("staged", "too_large")
        assert fetch(engine, [key(1)])[0] == [True]


def test_buffers_of_any_length_begin_anywhere_and_their_neighbours_stay(directory: Path) -> None:
    # Copies have a head, whole lines of 64 bytes and a tail; any of them may be empty.
    sizes = [size for line in (0, 64, 128, 4096, 300_032) for size in range(line + 1, line + 64, 13)]
    keys = [key(n) for n in range(len(sizes))]
    with Engine(config(directory)) as engine:
        assert set(engine.store(keys, [payload(n, size) for n, size in enumerate(sizes)])) == {"staged"}
        for at in (0, 1, 15, 16, 33, 63):
            memory = [bytearray(b"\xa5" * (size + 128)) for size in sizes]
            places = [memoryview(it)[at : at + size] for it, size in zip(memory, sizes, strict=True)]
            assert all(taken(engine.submit_load(keys, places)))
            for n, (it, size) in enumerate(zip(memory, sizes, strict=True)):
                assert it == b"\xa5" * at + payload(n, size) + b"\xa5" * (128 - at), (n, size, at)


def test_pages_of_a_region_are_gathered_and_scattered_and_nothing_beside_them_is_touched(directory: Path) -> None:
    memory = bytearray(payload(1, 4096))
    region = Region(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pieces = [3000, 100, 2000, 500]  # in any order, the chunk is in theirs
    addresses, sizes = [begin + it for it in pieces], [100, 50, 7, 100]
    (page,) = region.pages(addresses, sizes, 1)
    assert len(region) == 4096 and len(page) == 257
    wanted = bytes(memory[100:150] + memory[500:600] + memory[2000:2007] + memory[3000:3100])
    with Engine(config(directory)) as engine:
        assert engine.store([key(1)], [page]) == ["staged"]
        hits, flat = fetch(engine, [key(1)], 257)
        assert hits == [True] and bytes(flat[0]) == wanted
        old = bytes(memory)
        memory[:] = bytes(4096)
        del region
        assert taken(engine.submit_load([key(1)], [page])) == [True]
        expected = bytearray(4096)
        for start, size in zip(pieces, sizes):
            expected[start : start + size] = old[start : start + size]
        assert memory == expected
        # A chunk of another length is a miss.
        region = Region(memory)
        assert taken(engine.submit_load([key(1)], region.pages(addresses[:3], sizes[:3], 1))) == [False]
        assert memory == expected
        read_only = Region(bytes(64))
        assert len(read_only) == 64
        where = ctypes.cast(ctypes.c_char_p(b"x" * 64), ctypes.c_void_p).value
        for addresses, sizes in (([begin - 1], [1]), ([begin + 4096], [1]), ([begin], [4097]), ([0], [1]), ([where], [2**63])):
            raises(kvbraid.SizeError, "not in the region", region.pages, addresses, sizes, 1)
        raises(kvbraid.SizeError, "overlap", region.pages, [begin, begin + 5], [10, 10], 1)
        raises(kvbraid.SizeError, "each piece", region.pages, [begin, begin + 5], [1], 1)
        raises(kvbraid.SizeError, "each piece", region.pages, [begin, begin + 5, begin + 9], [1, 1, 1], 2)
        raises(kvbraid.SizeError, "one piece", Region, memoryview(memory)[::2])
        raises(TypeError, "", Region, 7)
        raises(OverflowError, "", region.pages, [-1], [1], 1)
        assert region.pages([], [], 0) == [] and region.pages([], [], 3) == []


def test_ranks_have_directories_of_their_own_and_a_part_of_everything(directory: Path) -> None:
    whole = {**config(directory), "engine": {**config(directory)["engine"], "socket": str(directory / "kv.sock")}}
    raises(kvbraid.ConfigError, "for each of 64 ranks", lambda: Engine(whole, rank=0, ranks=64))
    raises(kvbraid.ConfigError, "ranks", lambda: Engine(whole, rank=0, ranks=0))
    raises(kvbraid.ConfigError, "ranks: is missing beside rank 1", lambda: Engine(whole, rank=1))
    engines = [Engine(whole, rank=rank, ranks=2) for rank in (0, 1)]
    for rank, engine in enumerate(engines):
        stats = engine.stats()
        assert (stats["rank"], stats["ranks"]) == (rank, 2)
        assert [tier["capacity_bytes"] for tier in stats["tiers"]] == [128 << 20] * 2
        assert engine.store([key(1)], [payload(rank)]) == ["staged"] and engine.flush(30)
        assert (directory / f"rank-{rank}.kv.sock").exists() and (directory / "fast" / f"rank-{rank}").is_dir()
    for rank, engine in enumerate(engines):
        hits, buffers = fetch(engine, [key(1)])
        assert hits == [True] and bytes(buffers[0]) == payload(rank)
        engine.close()


def test_a_model_is_purged_and_others_stay(directory: Path) -> None:
    other = KeySpace(namespace(model="other")).key(bytes(32))
    with Engine(config(directory)) as engine:
        assert engine.store([key(1), other], [payload(1), payload(2)]) == ["staged"] * 2 and engine.flush(30)
        assert engine.purge("other") is True
        assert engine.lookup([key(1), other]) == [True, False]
    raises(kvbraid.ClosedError, "closed", engine.purge, "other")


def test_nothing_and_ten_thousand_keys(directory: Path) -> None:
    many = [key(n) for n in range(10_000)]
    with Engine(config(directory, chunk="4 KiB")) as engine:
        assert engine.lookup([]) == [] and engine.lock([]) == [] and engine.unlock([]) == 0 and engine.store([], []) == []
        assert engine.delete([]) == [] and taken(engine.submit_load([], [])) == []
        results = engine.store(many, [payload(n, 64) for n in range(10_000)])
        stored = [n for n, result in enumerate(results) if result == "staged"]
        assert len(stored) > 1000, "staging holds more than that"
        assert engine.lookup(many).count(True) >= len(stored)
        hits, buffers = fetch(engine, many, 64)
        assert all(hits[n] and bytes(buffers[n]) == payload(n, 64) for n in stored)
        assert all(hit or bytes(buffer) == bytes(64) for hit, buffer in zip(hits, buffers))


def test_a_load_larger_than_the_memory_of_the_queue_is_taken_while_it_runs(directory: Path) -> None:
    count = 64
    keys = [key(n) for n in range(count)]
    with Engine({**config(directory), "queue": {"memory": "4 MiB"}}) as engine:
        for part in (range(count // 2), range(count // 2, count)):
            # Half of what staging holds at a time: a slow disk is no reason to refuse any.
            results = engine.store([keys[n] for n in part], [payload(n) for n in part])
            assert set(results) == {"staged"} and engine.flush(30)
        hits, buffers = fetch(engine, keys + keys[:8])
        assert all(hits), hits
        assert [bytes(it) for it in buffers[:count]] == [payload(n) for n in range(count)]
        assert buffers[count:] == buffers[:8]


def test_chunks_that_many_loads_want_are_read_once(directory: Path) -> None:
    keys = [key(n) for n in range(10)]
    with Engine({**config(directory), "queue": {"gather_us": 200_000}}) as engine:
        engine.store(keys, [payload(n) for n in range(10)])
        assert engine.flush(30)
        loads = [(engine.submit_load(keys, buffers), buffers) for buffers in ([bytearray(300_000) for _ in keys] for _ in range(8))]
        for load, buffers in loads:
            assert all(taken(load)) and [bytes(it) for it in buffers] == [payload(n) for n in range(10)]
        stats = engine.stats()
        assert (stats["wanted"], stats["steps"]) == (10, 1), (stats["wanted"], stats["steps"])


def test_the_event_descriptor_tells_of_loads(directory: Path) -> None:
    with Engine(config(directory)) as engine:
        engine.store([key(1)], [payload(1)])
        poll = select.poll()
        poll.register(engine.load_fd, select.POLLIN)
        assert poll.poll(0) == []
        load = engine.submit_load([key(1), key(2)], [bytearray(300_000), bytearray(300_000)])
        hits = None
        while hits is None:
            assert poll.poll(10_000), "nothing was told"
            os.eventfd_read(engine.load_fd)
            hits = load.take()
        assert hits == [True, False] and load.done and load.take() == [False, False]


def test_locked_chunks_stay_and_a_second_unlock_does_nothing(directory: Path) -> None:
    with Engine(config(directory)) as engine:
        # Writes wait for the next forward pass.
        engine.forward_began(), engine.forward_ended()
        engine.store([key(1), key(2)], [payload(1), payload(2)])
        assert engine.delete([key(1)]) == [False], "it is still to be written"
        assert engine.flush(30)
        assert engine.lock([key(1), key(9), key(1)]) == [True, False, True]
        assert engine.delete([key(1), key(2), key(9)]) == [False, True, True]
        assert engine.lookup([key(1), key(2)]) == [True, False]
        assert engine.unlock([key(1)]) == 0 and engine.delete([key(1)]) == [False]
        assert engine.unlock([key(1), key(9)]) == 1
        assert engine.unlock([key(1)]) == 1 and engine.unlock([key(1)]) == 1
        assert engine.stats()["chunks_leased"] == 0 and engine.stats()["chunks_locked"] == 0
        assert engine.delete([key(1)]) == [True] and engine.lookup([key(1)]) == [False]
        end = time.monotonic() + 10
        while sum(tier["chunks"] for tier in engine.stats()["tiers"]) > 0:
            assert time.monotonic() < end, "the tiers keep what was deleted"
            time.sleep(0.01)
        assert set(engine.gone()) == {key(1).digest, key(2).digest}
        engine.store([key(1)], [payload(7)])
        assert engine.flush(30)
        hits, buffers = fetch(engine, [key(1)])
        assert hits == [True] and bytes(buffers[0]) == payload(7)


def test_closed_twice_and_used_afterwards(directory: Path) -> None:
    engine = Engine(config(directory))
    engine.store([key(1)], [payload(1)])
    buffer = bytearray(300_000)
    load = engine.submit_load([key(5)], [buffer])
    assert engine.close()["drained"] and engine.close()["drained"] and engine.closed
    calls = [
        lambda: engine.lookup([key(1)]),
        lambda: engine.lock([key(1)]),
        lambda: engine.unlock([key(1)]),
        lambda: engine.submit_load([key(1)], [buffer]),
        lambda: engine.store([key(1)], [b"x"]),
        lambda: engine.delete([key(1)]),
        engine.stats,
        engine.gone,
        engine.forward_began,
        engine.end_step,
        lambda: engine.flush(1),
        lambda: engine.load_fd,
    ]
    for call in calls:
        raises(kvbraid.ClosedError, "closed", call)
    assert taken(load) == [False]


def test_loads_that_nobody_takes_give_their_memory_back(directory: Path) -> None:
    keys = [key(n) for n in range(8)]
    with Engine({**config(directory), "queue": {"memory": "8 MiB", "keep_ms": 100}}) as engine:
        engine.store(keys, [payload(n) for n in range(8)])
        kept = [engine.submit_load(keys, [bytearray(300_000) for _ in keys]) for _ in range(4)]
        for n in range(50):
            engine.submit_load(keys, [bytearray(300_000) for _ in keys])  # given up at once
        time.sleep(0.5)
        hits, buffers = fetch(engine, keys)
        assert all(hits) and bytes(buffers[7]) == payload(7)
        del kept
    gc.collect()


def test_a_fork_is_told_and_the_parent_goes_on(directory: Path) -> None:
    engine = Engine({**config(directory, host_cache="256 MiB"), "queue": {"memory": "256 MiB"}})
    engine.store([key(1)], [payload(1)])
    assert engine.flush(30) and engine.lock([key(1)]) == [True]
    buffer = bytearray(300_000)
    load = engine.submit_load([key(1)], [buffer])

    def child() -> None:
        for call in (
            lambda: engine.lookup([key(1)]),
            lambda: engine.lock([key(1)]),
            lambda: engine.unlock([key(1)]),
            lambda: engine.submit_load([key(1)], [bytearray(1)]),
            lambda: engine.store([key(2)], [b"x"]),
            lambda: engine.delete([key(1)]),
            engine.stats,
            engine.close,
            load.take,
        ):
            raises(kvbraid.ForkedError, "parent", call)
        load.wait(5)
        globals()["_dropped"] = None
        gc.collect()

    in_child(child)
    assert taken(load) == [True] and bytes(buffer) == payload(1)
    engine.store([key(3)], [payload(3)])
    assert fetch(engine, [key(3)])[0] == [True]

    def dropping() -> None:
        nonlocal engine, load
        del engine, load
        gc.collect()

    in_child(dropping)
    assert fetch(engine, [key(1)])[0] == [True]
    engine.close()


def test_ctrl_c_ends_a_wait(directory: Path) -> None:
    slow = config(directory)
    for tier in slow["tier"]:
        tier["throttle"] = {"bytes_per_s": "1 MB"}
    keys, contents = [key(n) for n in range(100)], [payload(n) for n in range(100)]
    engine = Engine(slow)
    engine.store(keys, contents)
    stage = engine.submit_store([key(n) for n in range(100, 400)], [payload(n) for n in range(300)], 60)
    # Who runs in the background of a shell ignores it from the start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for wait in (lambda: engine.flush(60), lambda: stage.wait(60)):
        begun, alarm = time.monotonic(), threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        alarm.start()
        raises(KeyboardInterrupt, "", wait)
        assert time.monotonic() - begun < 30
    del stage
    engine.close(0)


ENDS = """
import builtins, os, sys, threading, time
from pathlib import Path
from check_wheel import *
engine = builtins.kept = Engine(config(Path(sys.argv[1])))
keys = [key(n) for n in range(8)]
assert set(engine.store(keys, [payload(n) for n in range(8)])) == {"staged"}
def work():
    while True:
        try:
            fetch(engine, keys)
            engine.lookup(keys), engine.stats(), engine.flush(0.01)
        except kvbraid.ClosedError:
            continue
for _ in range(6):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""


def test_the_end_of_the_interpreter_finds_no_thread_inside_and_closes_what_is_held(directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for turn in range(6):
        (where := directory / str(turn)).mkdir()
        command = [sys.executable, "-c", ENDS, str(where)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert child.returncode == 0, f"turn {turn} ended with {child.returncode}: {child.stderr[-2000:]}"
        with Engine(config(where)) as engine:
            assert all(engine.lookup([key(n) for n in range(8)])), "what was staged is lost"


def test_threads_share_an_engine_and_others_run_meanwhile(directory: Path) -> None:
    keys = [key(n) for n in range(32)]
    wrong: list[str] = []
    with Engine({**config(directory), "queue": {"memory": "16 MiB"}}) as engine:
        engine.store(keys, [payload(n) for n in range(32)])

        def work(first: int) -> None:
            for turn in range(10):
                chosen = [(first * 7 + turn + n) % 32 for n in range(12)]
                hits, buffers = fetch(engine, [keys[n] for n in chosen])
                if not all(hits) or any(bytes(it) != payload(n) for it, n in zip(buffers, chosen)):
                    wrong.append(f"thread {first}, turn {turn}: {hits}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and not any(thread.is_alive() for thread in threads), wrong[:3]
        assert engine.stats()["misses"] == 0


def test_a_damaged_chunk_is_read_from_the_other_tier_and_damaged_everywhere_it_is_a_miss(directory: Path) -> None:
    keys = [key(n) for n in range(6)]
    with Engine(config(directory)) as engine:
        engine.store(keys, [payload(n) for n in range(6)])
    for tier, expected in (("fast", True), ("slow", False)):
        for path in (directory / tier).rglob("*"):
            if path.is_file() and path.stat().st_size >= 1 << 20:
                data = path.read_bytes()
                for n in range(6):
                    data = data.replace(payload(n)[1000:1064], bytes(64))
                path.write_bytes(data)
        with Engine(config(directory)) as engine:
            hits, buffers = fetch(engine, keys)
            assert hits == [expected] * 6, (tier, hits)
            assert not expected or [bytes(it) for it in buffers] == [payload(n) for n in range(6)]


if __name__ == "__main__":
    run(globals())
