"""The L2 adapter under a thousand requests at once, and in hostile hands. Run by check_lmcache.py."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import kvbraid
from harness import config, namespace, raises
from lmcache_rig import SIZE, Memory, adapter, load, lookup, object_key, payload, store, told

REQUESTS = 1000
SMALL = 20_000


def test_a_thousand_requests_at_once_all_end_with_their_own_bytes(directory: Path) -> None:
    """Look-up, load, unlock of common keys, and a store of keys that others store as well, all in flight together."""
    common, chance = 64, random.Random(5)
    content = {n: payload(n)[:SMALL] for n in range(common + REQUESTS // 2)}
    made = adapter({**config(directory), "queue": {"memory": "16 MiB"}})
    assert store(made, [object_key(n) for n in range(common)], [content[n] for n in range(common)])
    assert made._engine.flush(30)
    threads = len(os.listdir("/proc/self/task"))
    looked: dict[int, list[int]] = {}
    loading: dict[int, tuple[list[int], list[Memory]]] = {}
    storing: set[int] = set()
    for request in range(REQUESTS):
        wanted = [chance.randrange(common) for _ in range(chance.randint(1, 6))]
        looked[made.submit_lookup_and_lock_task([object_key(n) for n in wanted], {})] = wanted
        memory = [Memory(SMALL) for _ in wanted]
        loading[made.submit_load_task([object_key(n) for n in wanted], memory)] = (wanted, memory)
        new = common + request // 2  # each is stored by two requests
        storing.add(made.submit_store_task([object_key(new)], [Memory(content[new])]))
    assert len(loading) == len(looked) == len(storing) == REQUESTS, "two tasks have one number"
    for task, wanted in looked.items():
        bits = made.query_lookup_and_lock_result(task)
        assert bits is not None and bits.popcount() == len(wanted)
    end, stored, wrong = time.monotonic() + 120, {}, []
    while (loading or len(stored) < REQUESTS) and time.monotonic() < end:
        stored.update(made.pop_completed_store_tasks())
        for task, (wanted, memory) in list(loading.items()):
            bits = made.query_load_result(task)
            if bits is None:
                continue
            del loading[task]
            wrong += [n for place, n in enumerate(wanted) if not bits.test(place) or memory[place].content != content[n]]
        time.sleep(0.001)
    assert not loading and set(stored) == storing, f"{len(loading)} loads and {REQUESTS - len(stored)} stores never ended"
    assert not wrong, f"{len(wrong)} chunks missing or wrong"
    assert all(it.is_successful() for it in stored.values())
    for wanted in looked.values():
        made.submit_unlock([object_key(n) for n in wanted])
    new = [object_key(n) for n in range(common, common + REQUESTS // 2)]
    assert all(lookup(made, new))
    made.submit_unlock(new)
    stats = made.report_status()["stats"]
    assert (stats["chunks_locked"], stats["misses"]) == (0, 0), stats["miss_reasons"]
    assert not made._loads and not made._lookups and not made._stored and not made._stalled, "tasks are kept"
    assert len(os.listdir("/proc/self/task")) == threads, "threads were started"
    made.close()


def test_buffers_of_a_wrong_size_are_misses_and_stay_as_they_are(directory: Path) -> None:
    made = adapter(config(directory))
    assert store(made, [object_key(1), object_key(2)], [payload(1), payload(2)])
    for size in (0, 1, SIZE - 1, SIZE + 1, 4 << 20):
        memory = [Memory(size), Memory(SIZE)]
        task = made.submit_load_task([object_key(1), object_key(2)], memory)
        bits = told(made.get_load_event_fd(), lambda task=task: made.query_load_result(task))
        assert [bits.test(n) for n in range(2)] == [False, True], size
        assert memory[0].content == bytes(size) and memory[1].content == payload(2)
    raises(ValueError, "1 keys and 2 objects", made.submit_load_task, [object_key(1)], [Memory(1), Memory(1)])
    raises(ValueError, "2 keys and 0 objects", made.submit_store_task, [object_key(1), object_key(2)], [])
    assert load(made, [object_key(1)])[0] == [True]
    made.close()


def test_odd_keys_are_misses_or_chunks_of_their_own(directory: Path) -> None:
    hashes = [b"", b"\0", b"1234", b"1234\0", bytes(8), bytes(9), b"\xff" * 64, bytes(65), bytes(1 << 16)]
    odd = [object_key(0, chunk_hash=it) for it in hashes]
    odd += [object_key(0, model_name=it) for it in ("", "\u00e9\U0001f600", "../../etc", "a\nb", "m" * 5000)]
    odd += [object_key(0, cache_salt=it) for it in ("t", "\u00e9", "x" * 128, "\ud800")]
    odd += [object_key(0, kv_rank=it) for it in (0, 0xFFFF_FFFF, 1 << 40, -1)]
    odd += [object_key(0, object_group_id=it) for it in (1, 0xFFFF_FFFF, 1 << 40)]
    made = adapter({**config(directory), "namespace": namespace(hash_algorithm="sha256_cbor")})
    assert not any(lookup(made, odd)) and not any(load(made, odd)[0])
    well = []
    for n, key in enumerate(odd):
        assert not lookup(made, [key])[0], "another key's chunk"
        if store(made, [key], [payload(n)]):
            well.append(n)
    refused = [key for n, key in enumerate(odd) if n not in well]
    assert len(refused) == 7, refused
    hits, found = load(made, odd)
    assert [n for n, hit in enumerate(hits) if hit] == well and all(found[n] == payload(n) for n in well)
    made.delete(odd)
    made.submit_unlock(odd)
    made.close()


def test_no_keys_and_ten_thousand(directory: Path) -> None:
    made = adapter(config(directory, chunk="4 KiB", staging="96 MiB"))
    assert store(made, [], []) and lookup(made, []) == [] and load(made, []) == ([], [])
    made.submit_unlock([]), made.delete([])
    keys = [object_key(n) for n in range(10_000)]
    task = made.submit_store_task(keys, [Memory(n.to_bytes(64, "big")) for n in range(10_000)])
    assert told(made.get_store_event_fd(), made.pop_completed_store_tasks)[task].is_successful()
    assert all(lookup(made, keys))
    memory = [Memory(64) for _ in keys]
    task = made.submit_load_task(keys, memory)
    bits = told(made.get_load_event_fd(), lambda: made.query_load_result(task))
    assert bits.popcount() == 10_000 and all(int.from_bytes(it.content, "big") == n for n, it in enumerate(memory))
    made.submit_unlock(keys)
    assert made.report_status()["stats"]["chunks_locked"] == 0
    made.close()


def test_an_unlock_too_many_takes_nobody_elses_lock(directory: Path) -> None:
    keys = [object_key(n) for n in range(4)]
    made = adapter(config(directory))
    assert store(made, keys, [payload(n) for n in range(4)]) and made._engine.flush(30)
    made.submit_unlock(keys)
    made.submit_unlock([*keys, *keys])
    assert all(lookup(made, keys)) and all(lookup(made, keys[:1]))
    made.submit_unlock(keys)
    made.delete(keys)
    assert lookup(made, keys) == [True, False, False, False]
    made.close()


def test_chunks_of_an_earlier_server_are_listed(directory: Path) -> None:
    keys = [object_key(n, cache_salt="s" if n % 2 else "") for n in range(8)]
    keys += [object_key(8, chunk_hash=b"1234"), object_key(9, model_name="other"), object_key(9, object_group_id=3)]
    made = adapter(config(directory))
    assert store(made, keys, [payload(n) for n in range(len(keys))])
    made.close()
    foreign = adapter({**config(directory), "namespace": namespace(weights="2")})
    assert store(foreign, [object_key(n) for n in range(30, 33)], [payload(n) for n in range(3)])
    foreign.close()
    made = adapter(config(directory))
    assert store(made, [object_key(20)], [payload(20)])
    listed = [it.key.to_object_key() for it in made.list_l2_keys().entries]
    assert len(listed) == len(keys) + 1 and set(listed) == {*keys, object_key(20)}
    assert [it.key.to_object_key() for it in made.list_l2_keys(model_name="other").entries] == [keys[9]]
    assert made.get_usage().total_bytes_used == 12 * SIZE
    made.delete(keys)
    assert [it.key.to_object_key() for it in made.list_l2_keys().entries] == [object_key(20)]
    made.close()


def test_a_fork_of_the_server_touches_nothing(directory: Path) -> None:
    made = adapter({**config(directory, host_cache="256 MiB"), "queue": {"memory": "256 MiB"}})
    assert store(made, [object_key(1)], [payload(1)]) and made._engine.flush(30)
    memory = Memory(SIZE)
    task = made.submit_load_task([object_key(1)], [memory])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(30)
            in_child(made, task)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, "the child failed or hung"
    bits = told(made.get_load_event_fd(), lambda: made.query_load_result(task))
    assert bits.test(0) and memory.content == payload(1)
    made.close()


def in_child(made: Any, task: int) -> None:
    calls = (
        lambda: made.submit_lookup_and_lock_task([object_key(1)], {}),
        lambda: made.submit_load_task([object_key(1)], [Memory(SIZE)]),
        lambda: made.submit_store_task([object_key(2)], [Memory(1)]),
        lambda: made.query_load_result(task),
        lambda: made.delete([object_key(1)]),
        made.close,
    )
    for call in calls:
        raises(kvbraid.ForkedError, "parent", call)
    gc.collect()


class Freed(Memory):
    """An object that LMCache takes back while its store waits for room."""

    asked = 0

    @property
    def byte_array(self) -> memoryview:
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("freed")
        return super().byte_array


def test_a_waiting_store_that_fails_is_told_and_the_others_end(directory: Path) -> None:
    slow = config(directory, staging="2 MiB")
    for tier in slow["tier"]:
        tier["throttle"] = {"bytes_per_s": "4 MB"}
    made = adapter(slow)
    tasks = {}
    for n in range(4):
        objects = [(Freed if n == 1 else Memory)(payload(4 * n + it)) for it in range(4)]
        tasks[made.submit_store_task([object_key(4 * n + it) for it in range(4)], objects)] = n
    ended: dict[int, bool] = {}
    while len(ended) < len(tasks):
        found = told(made.get_store_event_fd(), made.pop_completed_store_tasks)
        ended |= {tasks[it]: result.is_successful() for it, result in found.items()}
    assert ended == {0: True, 1: False, 2: True, 3: True}
    made.close()


def test_objects_that_are_too_large_are_told_of_once_with_what_to_write(directory: Path) -> None:
    told_of: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told_of.append(record.getMessage())
    logging.getLogger("kvbraid.lmcache").addHandler(handler)
    made = adapter(config(directory, chunk="16 KiB"))
    for n in range(3):
        assert not store(made, [object_key(n)], [payload(n)[:SMALL]])
    assert store(made, [object_key(4)], [payload(4)[:1000]])
    made.close()
    logging.getLogger("kvbraid.lmcache").removeHandler(handler)
    (text,) = told_of
    assert f"{SMALL} bytes" in text and "chunk_bytes_max = 16384" in text and '"20 KiB"' in text


def test_locks_of_look_ups_that_nobody_asks_about_are_taken_back(directory: Path) -> None:
    keys, forgotten_s = [object_key(n) for n in range(4)], kvbraid.lmcache.FORGOTTEN_S
    made = adapter(config(directory))
    assert store(made, keys, [payload(n) for n in range(4)]) and made._engine.flush(30)
    try:
        kvbraid.lmcache.FORGOTTEN_S = 0.1
        asked = made.submit_lookup_and_lock_task(keys[:2], {})
        assert made.query_lookup_and_lock_result(asked).popcount() == 2
        left = made.submit_lookup_and_lock_task([*keys[1:], object_key(9)], {})
        time.sleep(0.2)
        assert lookup(made, keys[:1]) == [True]
        made.delete(keys)
        assert lookup(made, keys) == [True, True, False, False], "what is asked about stays locked"
        late = made.query_lookup_and_lock_result(left)
        assert len(late) == 4 and late.popcount() == 0
        time.sleep(1.1)
        made.submit_lookup_and_lock_task([], {})
        assert made.query_lookup_and_lock_result(left) is None
    finally:
        kvbraid.lmcache.FORGOTTEN_S = forgotten_s
    made.close()


def test_a_load_that_takes_long_is_not_forgotten(directory: Path) -> None:
    keys, forgotten_s = [object_key(n) for n in range(4)], kvbraid.lmcache.FORGOTTEN_S
    made = adapter({**config(directory), "queue": {"gather_us": 300_000}})
    assert store(made, keys, [payload(n) for n in range(4)])
    try:
        kvbraid.lmcache.FORGOTTEN_S = 0.01
        task = made.submit_load_task(keys, [Memory(SIZE) for _ in keys])
        time.sleep(0.02)
        # Others come meanwhile, and after its end.
        made.submit_load_task(keys[:1], [Memory(SIZE)])
        while not made._loads[task].load.done:
            time.sleep(0.01)
        made.submit_load_task(keys[:1], [Memory(SIZE)])
        bits = told(made.get_load_event_fd(), lambda: made.query_load_result(task))
        assert bits.popcount() == 4
        left = set(made._loads)
        for _ in range(3):
            time.sleep(0.5)
            made.submit_load_task([], [])
        assert not left & set(made._loads), "loads that nobody asks for are kept"
    finally:
        kvbraid.lmcache.FORGOTTEN_S = forgotten_s
    made.close()


def test_a_call_that_a_close_overtakes_writes_into_nobodys_files(directory: Path) -> None:
    made = adapter(config(directory))
    whole, files = made._engine, []

    class Overtaken:
        """An engine whose adapter is closed in the middle of a call; others open files then."""

        def __getattr__(self, name: str) -> Any:
            real = getattr(whole, name)

            def call(*arguments: Any) -> Any:
                answer = real(*arguments)
                if not files:
                    made._engine = whole
                    made.close()
                    files.extend((directory / f"file {n}").open("wb") for n in range(100))
                return answer

            return call if name in ("store", "lock") else real

    for ask in (
        lambda: made.submit_store_task([object_key(1)], [Memory(payload(1))]),
        lambda: made.submit_lookup_and_lock_task([object_key(1)], {}),
    ):
        made._engine = Overtaken()
        try:
            ask()
        except kvbraid.ClosedError:
            pass
        assert files and not any((directory / f"file {n}").stat().st_size for n in range(100))
        while files:
            files.pop().close()
        made = adapter(config(directory))
        whole = made._engine
    made.close()
