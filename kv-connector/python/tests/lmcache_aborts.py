"""LMCache's storage manager, whose requests are given up and which is shut down at random moments. Run by check_lmcache.py."""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

from harness import config
from lmcache_rig import object_key, payload, spec

ABORTS = 200
EACH_RESTART = 10
"""Aborts between two restarts."""
WARM = 3
"""Restarts after which nothing is set up for the first time any more."""
CHUNKS = 48
TENSOR = [2, 4, 16, 512]
CHUNK_BYTES = 2 * 4 * 16 * 512 * 2
"""Of one such tensor."""
WAIT_S = 30.0
LEAK_KIB = 64 << 10


def content(n: int) -> bytes:
    return payload(n)[:CHUNK_BYTES]


class Node:
    """One life of LMCache over the adapter."""

    def __init__(self, directory: Path) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
        from lmcache.v1.distributed.storage_manager import StorageManager

        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        # Memory for half of the chunks: what one request gives up the next one gets.
        size = CHUNKS * CHUNK_BYTES / 2 / (1 << 30)
        arguments = ["--l1-size-gb", f"{size:.6f}", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        arguments += ["--l2-prefetch-max-in-flight", "64", "--l2-adapter", spec(config(directory))]
        self._manager = StorageManager(parse_args_to_config(parser.parse_args(arguments)))
        self._layout = MemoryLayoutDesc([torch.Size(TENSOR)], [torch.bfloat16])
        self.adapter: Any = self._manager.l2_adapters()[0][1]

    def store(self, numbers: list[int]) -> None:
        keys = {object_key(n): n for n in numbers}
        objects = self._manager.reserve_write(list(keys), self._layout)
        assert len(objects) == len(keys), "no memory for what is stored"
        for key, n in keys.items():
            objects[key].byte_array.cast("B")[:] = content(n)
        self._manager.finish_write(list(keys))
        self._wait(lambda: self.adapter.report_status()["stats"]["chunks_held"] > max(numbers))
        assert self.adapter._engine.flush(WAIT_S)
        self._wait(lambda: self._manager.delete_l1_keys(list(keys))[1] == 0)

    def ask(self, numbers: list[int]) -> tuple[Any, list[int]]:
        """A request that nobody waits for yet."""
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        keys = [object_key(n) for n in numbers]
        return self._manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self._layout)])), numbers

    def fail_at(self, query: int, is_after: bool) -> None:
        """LMCache fails in this answer of a load from now, before or after what has come was taken.

        It gives the request up then: its memory is free at once, and what the adapter still loads is nobody's.
        """
        real, left = type(self.adapter).query_load_result, [query]

        def failing(task: int) -> Any:
            left[0] -= 1
            if left[0] != 0:
                return real(self.adapter, task)
            if is_after:
                real(self.adapter, task)
            raise RuntimeError("as wanted")

        self.adapter.query_load_result = failing

    def check(self, asked: tuple[Any, list[int]]) -> int:
        """Waits for a request; how many chunks came, all of them right."""
        handle, numbers = asked
        assert self._manager.wait_prefetch_status(handle, WAIT_S), "a request does not end"
        hits = self._manager.query_prefetch_status(handle)
        count = hits.l1_hit_count + hits.l2_hit_count
        keys = [object_key(n) for n in numbers[:count]]
        if keys:
            with self._manager.read_prefetched_results(keys) as objects:
                for n, found in zip(numbers, objects or (), strict=False):
                    assert bytes(found.byte_array) == content(n), f"wrong bytes of chunk {n}"
            self._manager.finish_read_prefetched(keys)
            self._manager.delete_l1_keys(keys)
        return count

    def locked(self) -> int:
        return self.adapter.report_status()["stats"]["chunks_locked"]

    def close(self) -> None:
        self._manager.close()

    @staticmethod
    def _wait(done: Any) -> None:
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end, "it does not end"
            time.sleep(0.005)


def used() -> tuple[int, int, int]:
    """Threads, open files and KiB of memory of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), int(resident.split()[1])


def some(chance: random.Random) -> list[int]:
    first, count = chance.randrange(CHUNKS), chance.randint(1, 8)
    return [n % CHUNKS for n in range(first, first + count)]


def test_requests_given_up_and_restarts_at_random_moments_leave_nothing_behind(directory: Path) -> None:
    chance = random.Random(11)
    node = Node(directory)
    for first in range(0, CHUNKS, 8):
        node.store(list(range(first, first + 8)))
    whole = given_up = lives = 0
    before = (0, 0, 0)
    for turn in range(ABORTS):
        if turn % EACH_RESTART == 0:
            for _ in range(chance.randint(0, 4)):
                node.ask(some(chance))
            time.sleep(chance.choice((0, 0.001, 0.01)))
            node.close()
            lives += 1
            if lives == WARM:
                before = used()
            node = Node(directory)
        node.fail_at(chance.randint(1, 3), chance.random() < 0.5)
        for numbers, count in [(it[1], node.check(it)) for it in [node.ask(some(chance)) for _ in range(3)]]:
            whole += count == len(numbers)
            given_up += count == 0
    assert given_up >= ABORTS / 2 and whole >= ABORTS / 2, (given_up, whole)
    node._wait(lambda: node.locked() == 0)
    assert sum(node.check(node.ask([n])) for n in range(CHUNKS)) == CHUNKS, "chunks are gone"
    node.close()
    threads, files, kib = used()
    assert threads <= before[0] and files <= before[1], f"{threads} threads, {files} files, before {before}"
    assert kib <= before[2] + LEAK_KIB, f"{kib} KiB resident, before {before[2]}"
    print(f"{ABORTS} turns: {given_up} requests given up, {whole} served whole, {lives} restarts")
