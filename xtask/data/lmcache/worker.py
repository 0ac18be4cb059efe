"""One back end in one process."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import alone
import psutil
from answering import drop_pages, serve
from managers import InProcess, MultiProcess, Shape


def cpu_s() -> float:
    """CPU time of this process and its children so far, all threads, user and system."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    alive = [child.cpu_times() for child in psutil.Process().children()]
    return sum(it.ru_utime + it.ru_stime for it in each) + sum(it.user + it.system for it in alive)


def manager(order: dict[str, Any]) -> Any:
    shape = Shape(order["chunk_bytes"], order["chunks"], order["requests"])
    if "hicache" in order:
        # Its imports are not LMCache's business.
        from hicache import HiCachePool

        return HiCachePool(shape, order)
    if "mooncake" in order:
        from mooncake_connector import MooncakeConnector

        return MooncakeConnector(shape, order["mooncake"])
    if "local_disk" in order:
        options = {"local_disk": order["local_disk"], "max_local_disk_size": 2 * shape.memory_gib}
        options["extra_config"] = {"use_odirect": True, "disk_io_threads": order["threads"]}
        return InProcess(shape, "LocalDiskBackend", options, order["async"])
    return MultiProcess(shape, order["adapters"])


class Worker:
    """Knows one manager, once it is opened."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._order: dict[str, Any] = {}
        self._duplicate_bytes = 0

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, "on_" + order["do"])(order)

    def on_open(self, order: dict[str, Any]) -> dict[str, Any]:
        self._order, self._manager = order, manager(order)
        begun = time.monotonic()
        self._manager.store()
        os.sync()
        self._duplicate_bytes = self._manager.settle()
        return {"store_s": time.monotonic() - begun}

    def on_prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        drop_pages(self._order["paths"])
        return {}

    def on_read(self, order: dict[str, Any]) -> dict[str, Any]:
        """All chunks, until that has taken long enough: only reading is timed, and charged to the processor."""
        seconds = cpu = 0.0
        hits = wrong = passes = 0
        while passes == 0 or seconds < order["seconds"]:
            passes += 1
            cpu_before, begun = cpu_s(), time.monotonic()
            hits += self._manager.read()
            seconds += time.monotonic() - begun
            cpu += cpu_s() - cpu_before
            wrong += self._manager.check()
        before, self._duplicate_bytes = self._duplicate_bytes, self._manager.settle()
        return {
            "seconds": seconds,
            "bytes": hits * self._order["chunk_bytes"],
            "hits": hits,
            "wanted": self._order["chunks"] * passes,
            "bytes_wrong": wrong,
            "duplicate_bytes": self._duplicate_bytes - before,
            "cpu_s": cpu,
        }

    def on_write(self, order: dict[str, Any]) -> dict[str, Any]:
        alone.write(order["path"], order["bytes"], order["block_bytes"])
        return {}

    def on_alone(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"arrivals": alone.read(order["path"], order["bytes"], order["block_bytes"])}

    def on_overhead(self, order: dict[str, Any]) -> dict[str, Any]:
        import overhead

        return overhead.measure(self._manager, order["keys"], order["reps"])

    def on_close(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._manager is not None:
            self._manager.close()
        return {}


if __name__ == "__main__":
    serve(Worker().do)
