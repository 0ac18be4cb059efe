"""One device alone: large direct reads by two threads, and when how much had come."""

from __future__ import annotations

import mmap
import os
import threading
import time

THREADS = 2


def read(path: str, size: int, block: int) -> list[tuple[float, int]]:
    """Reads the first `size` bytes of a file; seconds since the begin, and bytes by then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = iter(range(0, size, block))
    lock = threading.Lock()
    arrivals: list[tuple[float, int]] = []
    begun = time.monotonic()

    def run() -> None:
        buffer = mmap.mmap(-1, block)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            length = os.preadv(descriptor, [buffer], offset)
            with lock:
                before = arrivals[-1][1] if arrivals else 0
                arrivals.append((time.monotonic() - begun, before + length))

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    os.close(descriptor)
    return arrivals


def write(path: str, size: int, block: int) -> None:
    """A file for it, of bytes that no file system leaves out."""
    content = os.urandom(block)
    with open(path, "wb") as file:
        for _ in range(0, size, block):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
