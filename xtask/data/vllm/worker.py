"""One vLLM with one back end behind it."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import alone
import vllm_cpu
from answering import drop_pages, serve
from driver import Driver, Outcome
from load import BLOCK, Ask, Shape, arrivals, blocks_of, fill, read
from server import Server, find
from tiny_model import make
from vllm_cpu import Vllm, tiering

WAIT_S = 120.0
MOSTLY = 0.75
"""A request of which so much was stored before waits for storage."""


class Worker:
    """Knows one engine, once it is opened."""

    def __init__(self) -> None:
        self._order: dict[str, Any] = {}
        self._engine: Any = None
        self._server: Server | None = None
        self._driver: Any = None
        self._stored: set[int] = set()
        self._measured: list[Shape] = []
        self._kept: set[Path] = set()
        """Files that are there before a cell, where files pile up."""

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, "on_" + order["do"])(order)

    def on_open(self, order: dict[str, Any]) -> dict[str, Any]:
        """The engine, and what the trace's first requests leave in its storage."""
        self._order = order
        home, load = Path(order["home"]), order["load"]
        transfer = None
        if "adapter" in order:
            self._server = Server(home, order["name"], BLOCK, order["l1_gb"], order["adapter"])
        model = make(home / f"{order['name']}-model", **order["model"])
        if self._server is not None:
            transfer = self._server.connector()
        elif "tier" in order:
            transfer = tiering(order["tier"], primary=order["primary"])
        self._engine = Vllm(model, transfer, enable_prefix_caching=False, skip_tokenizer_init=True, **order["engine"])
        self._driver = Driver(self._engine)
        shapes = read(load["trace"], load["blocks_max"])
        before, self._measured = shapes[: load["before"]], shapes[load["before"] :][: load["requests"]]
        self._stored = blocks_of(before)
        begun = time.monotonic()
        # Who keeps nothing, or has it already, only warms up.
        self._warm(before[:4] if transfer is None or order["stored"] else before)
        self._kept = self._files()
        return {"store_s": time.monotonic() - begun, "blocks": len(self._stored)}

    def _warm(self, shapes: list[Shape]) -> None:
        """A few at a time: what finds no room in memory is not stored."""
        asks = fill(shapes, blocks_of(shapes), "")
        for at in range(0, len(asks), 4):
            few = [Ask(it.prompt, 1, it.wanted) for it in asks[at : at + 4]]
            outcomes = self._driver.run(few, [0.0] * len(few), WAIT_S)
            assert all(it.reason == "length" for it in outcomes), "a request failed"
            self._driver.settle(WAIT_S)
        self._settle()

    def _settle(self) -> None:
        """All that was computed is on the devices, and nothing is in memory."""
        self._driver.settle(WAIT_S)
        if self._server is not None:
            self._server.settle()
            self._server.forget()
        elif "tier" in self._order:
            tier = self._engine.tier
            tier.drain_jobs()
            engine = getattr(tier, "_engine", None)
            assert engine is None or engine.flush(WAIT_S), "staging is not empty"
            self._engine.forget()

    def _files(self) -> set[Path]:
        fresh = self._order.get("fresh")
        return {it for it in Path(fresh).rglob("*") if it.is_file()} if fresh else set()

    def on_prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        self._settle()
        for path in self._files() - self._kept:
            path.unlink()
        os.sync()
        drop_pages(self._order["paths"])
        return {}

    def on_alone(self, order: dict[str, Any]) -> dict[str, Any]:
        """Requests one by one: how long each waits for its prefix, and how long for its first token."""
        asks = [it for it in fill(self._measured, self._stored, "alone") if it.wanted >= MOSTLY * len(it.prompt)]
        asks = asks[: order["requests"]]
        outcomes = [self._driver.run([it], [0.0], WAIT_S)[0] for it in asks]
        return {
            "retrieval_s": [it.scheduled_s for it in outcomes],
            "ttft_s": [it.first_s for it in outcomes],
            "hit_tokens": sum(it.cached for it in outcomes),
            "prompt_tokens": sum(len(it.prompt) for it in asks),
            "windows": self._windows(),
        }

    def _windows(self) -> list[int] | None:
        """Reads that each of our tiers has in flight, as learned by now."""
        if self._server is not None:
            stats = find(self._server.status(), "stats") or {}
        else:
            engine = getattr(self._engine.tier, "_engine", None) if "tier" in self._order else None
            stats = engine.stats() if engine else {}
        return [it["window"] for it in stats["tiers"]] if "tiers" in stats else None

    def on_cell(self, order: dict[str, Any]) -> dict[str, Any]:
        """The trace's next requests, at a rate; at none all arrive at once."""
        asks = fill(self._measured[: order["requests"]], self._stored, order["cell"])
        times = arrivals(len(asks), order["per_s"], order["cv"], order["seed"])
        before = self._cpu_s()
        outcomes = self._driver.run(asks, times, order["limit_s"])
        cpu_s = self._cpu_s() - before
        return {"cpu_s": cpu_s, **figures(asks, outcomes)}

    def _cpu_s(self) -> float:
        own = time.process_time()
        return own if self._server is None else own + self._server.cpu_s()

    def on_write(self, order: dict[str, Any]) -> dict[str, Any]:
        alone.write(order["path"], order["bytes"], order["block_bytes"])
        return {}

    def on_read(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"arrivals": alone.read(order["path"], order["bytes"], order["block_bytes"])}

    def on_close(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._server is not None:
            self._server.close()
        elif self._engine is not None:
            self._engine.close()
        return {}


def figures(asks: list[Ask], outcomes: list[Outcome]) -> dict[str, Any]:
    """Of one cell. A request that failed has no time."""
    ended = [
        it for it, ask in zip(outcomes, asks, strict=False) if it.reason == "length" and len(it.tokens) == ask.output
    ]
    found: dict[str, Any] = {
        "requests": len(asks),
        "failed": len(asks) - len(ended),
        "tokens": [it.tokens for it in outcomes],
        "hit_tokens": sum(it.cached for it in outcomes),
        "wanted_tokens": sum(it.wanted for it in asks),
        "prompt_tokens": sum(len(it.prompt) for it in asks),
    }
    if found["failed"]:
        return found
    first = sorted(it.first_s or 0.0 for it in ended)
    seconds = max(it.arrived + (it.end_s or 0.0) for it in ended)
    found |= {
        "seconds": seconds,
        "ttft_mean_s": statistics.fmean(first),
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p99_s": quantile(first, 0.99),
        "ttft_s": [it.first_s for it in ended],
        "tokens_per_s": (found["prompt_tokens"] + sum(len(it.tokens) for it in ended)) / seconds,
    }
    return found


def quantile(ordered: list[float], part: float) -> float:
    """Between neighbours, linearly."""
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


if __name__ == "__main__":
    # It sets the environment that vLLM is imported in.
    assert vllm_cpu.BLOCK == BLOCK
    serve(Worker().do)
