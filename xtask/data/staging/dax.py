"""LMCache's own Device-DAX adapter on a file, demand access: reads what it is told on standard input, a line each.

LMCache, its memory and its copies of the objects are set up first. Then this process joins the cgroups, so that from
there on only the device's pages count as fast memory, and only the reads are throttled.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

WAIT_S = 120.0
"""Longer than any read: what has not come by then does not come."""
GIB = 1 << 30
IN_MEMORY = 8
"""Objects that LMCache's own memory holds: those being read, and some."""
POISON = 0xA5


def content(offset: int, size: int) -> Any:
    """The words of the file from a byte offset on; each follows from where it is."""
    value = np.arange(offset, offset + size, 8, dtype=np.uint64)
    value ^= np.uint64(0x9E3779B97F4A7C15)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(29)
    return value


class Dax:
    """LMCache's storage manager with its adapter for Device-DAX: objects of one size, each a slot."""

    def __init__(self, path: str, objects: int, object_bytes: int) -> None:
        adapter = {
            "type": "dax",
            "device_path": path,
            "max_dax_size_gb": objects * object_bytes / GIB,
            "slot_bytes": object_bytes,
        }
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        memory_gib = str((IN_MEMORY + 1) * object_bytes / GIB)
        arguments = ["--l1-size-gb", memory_gib, "--no-l1-use-lazy", "--eviction-policy", "noop"]
        arguments += ["--l2-adapter", json.dumps(adapter)]
        self._manager = StorageManager(parse_args_to_config(parser.parse_args(arguments)))
        self._path, self._object_bytes = path, object_bytes
        # Keys and values of 256 tokens in 4 layers, in two bytes each.
        width = object_bytes // (2 * 4 * 256 * 2)
        self._layout = MemoryLayoutDesc([torch.Size([2, 4, 256, width])], [torch.bfloat16])
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        names = [number.to_bytes(32, "big") for number in range(objects)]
        self._keys = [ObjectKey(name, "bench/model", rank) for name in names]
        # Two that read one object would find it in LMCache's memory, not on the device.
        self._locks = [threading.Lock() for _ in names]
        self.checked_bytes = 0

    def store(self) -> None:
        """In order, so that every object lies where its content says; some at once, so that all memory is used once."""
        for begin in range(0, len(self._keys), IN_MEMORY):
            keys = self._keys[begin : begin + IN_MEMORY]
            objects = self._manager.reserve_write(keys, self._layout)
            assert len(objects) == len(keys), f"memory for {len(objects)} of {len(keys)} objects"
            for number, key in enumerate(keys, begin):
                words = np.frombuffer(objects[key].byte_array, dtype=np.uint64)
                words[:] = content(number * self._object_bytes, self._object_bytes)
                self._manager.finish_write([key])
                self._wait_for_store(number + 1)
            for key in keys:
                self._leave_memory(key)

    def make_cold(self) -> int:
        """Nothing of the file is in memory any more; how much is nevertheless."""
        mapping = self._adapter._core.mmap_obj
        mapping.flush()
        # What is mapped is not dropped.
        mapping.madvise(mmap.MADV_DONTNEED)
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = -(-len(mapping) // mmap.PAGESIZE)
        present = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), present) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return int(np.count_nonzero(np.frombuffer(present, dtype=np.uint8) & 1)) * mmap.PAGESIZE

    def read(self, number: int, arrived: Any) -> None:
        """Reads as LMCache's server does, calls `arrived` when the bytes are in its memory, and checks them."""
        with self._locks[number]:
            key = self._keys[number]
            handle = self._manager.submit_prefetch_task(
                PrefetchTaskSpec([GroupedObjectKeys([key], 0, self._layout)])
            )
            if not self._manager.wait_prefetch_status(handle, WAIT_S):
                raise TimeoutError(f"object {number} does not come")
            result = self._manager.query_prefetch_status(handle)
            assert (result.l1_hit_count, result.l2_hit_count) == (0, 1), f"object {number}: {result}"
            arrived()
            with self._manager.read_prefetched_results([key]) as objects:
                assert objects is not None, f"object {number} is not in memory"
                words = np.frombuffer(objects[0].byte_array, dtype=np.uint64)
                due = content(number * self._object_bytes, self._object_bytes)
                assert np.array_equal(words, due), f"object {number}: wrong bytes"
                # No later read passes by what was here.
                words.view(np.uint8).fill(POISON)
            self._manager.finish_read_prefetched([key])
            self._leave_memory(key)
            self.checked_bytes += self._object_bytes

    @property
    def _adapter(self) -> Any:
        (_, adapter), *_ = self._manager.l2_adapters()
        return adapter

    def _wait_for_store(self, objects: int) -> None:
        """A store begins a moment after the write, so it is not enough that none is under way."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            status = self._adapter.report_status()
            if status["live_slot_count"] == objects and status["inflight_store_tasks"] == 0:
                return
            time.sleep(0.001)
        raise TimeoutError("a store does not end")

    def _leave_memory(self, key: Any) -> None:
        """A lock goes a moment after what it was for."""
        end = time.monotonic() + WAIT_S
        while self._manager.delete_l1_keys([key])[1]:
            if time.monotonic() > end:
                raise TimeoutError("an object does not leave memory")
            time.sleep(0.001)


class Answers:
    """Lines on what was standard output; whatever LMCache prints there goes to standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def say(self, **answer: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(answer) + "\n")

    def fail(self, error: BaseException) -> NoReturn:
        traceback.print_exc()
        self.say(error=f"{type(error).__name__}: {error}")
        # Threads of LMCache must not keep it.
        os._exit(1)


def serve(dax: Dax, answers: Answers, readers: int) -> None:
    def read(order: dict[str, int]) -> None:
        try:
            dax.read(order["object"], lambda: answers.say(claim=order["claim"]))
        except BaseException as error:
            answers.fail(error)

    with ThreadPoolExecutor(readers) as pool:
        for line in sys.stdin:
            pool.submit(read, json.loads(line))
    answers.say(checked_bytes=dax.checked_bytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", required=True)
    parser.add_argument("--objects", type=int, required=True)
    parser.add_argument("--object-bytes", type=int, required=True)
    parser.add_argument("--readers", type=int, required=True)
    parser.add_argument("--cgroup", action="append", default=[])
    options = parser.parse_args()
    answers = Answers()
    try:
        dax = Dax(options.file, options.objects, options.object_bytes)
        dax.store()
        resident = dax.make_cold()
        for cgroup in options.cgroup:
            Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
        answers.say(ready=True, resident_bytes=resident)
        serve(dax, answers, options.readers)
    except BaseException as error:
        answers.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()
