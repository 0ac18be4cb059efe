"""The README's LMCache quick start, on the processor: equal tokens, counted loads, marks, damage, several groups."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quick_start
from check_lmcache import LMCACHE, find, free_ports, get
from harness import run
from tiny_model import make, make_hybrid
from vllm_cpu import Vllm, prompts
from vllm_tier import damage

os.environ["PYTHONHASHSEED"] = "0"
HOME = Path(tempfile.mkdtemp(prefix="kvbraid-mp-"))
PROMPTS = prompts(lengths=(700, 400, 650, 131, 600, 645))
CAP = 256 << 20
"""Of each tier, for all processes together."""
TOKENS = 64
"""A chunk of LMCache."""
SOON = 60.0
MARKED = "LMCache, with marks"
NEVER_MS = 600_000
"""Longer than this script runs."""


class Server:
    """LMCache's, on loopback; started at once, asked when it is up."""

    def __init__(self) -> None:
        self.rpc, self.http = free_ports(2)
        words = quick_start.command("LMCache", "lmcache server", "vllm serve")
        assert words[:2] == ["lmcache", "server"], words
        command = [LMCACHE, *words[1:]]
        path = quick_start.configuration("LMCache", HOME, capacity=f"{CAP >> 20} MiB", chunk_tokens=str(TOKENS))
        # Only a forward pass lets a write begin, where marks tell of them.
        path.write_text(path.read_text().replace("[engine]\n", f"[engine]\nwrite_max_age_ms = {NEVER_MS}\n"))
        command += quick_start.command(MARKED, "--server-module", "\nvllm serve")
        self._replace(command, "--l2-adapter", "/etc/kvbraid.toml", str(path))
        self._replace(command, "--l1-size-gb", "60", "1")
        # Several servers on one machine, and a small model.
        command += ["--host", "127.0.0.1", "--port", str(self.rpc), "--http-host", "127.0.0.1", "--http-port", str(self.http)]
        command += ["--shm-name", f"kvbraid-{os.getpid()}", "--disable-metrics", "--chunk-size", str(TOKENS)]
        command += ["--supported-transfer-mode", "auto"]
        self.log = HOME / "server.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=os.environ, stdout=out, stderr=subprocess.STDOUT)

    @staticmethod
    def _replace(command: list[str], option: str, old: str, new: str) -> None:
        place = command.index(option) + 1
        assert command[place].count(old) == 1, command
        command[place] = command[place].replace(old, new)

    def ready(self) -> None:
        end = time.monotonic() + 600
        while True:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-3000:]
            try:
                self.stats()
                return
            except OSError:
                time.sleep(0.2)

    def stats(self) -> dict[str, Any]:
        return find(get(f"http://127.0.0.1:{self.http}/status"), "stats")

    def hits(self) -> list[int]:
        return [it["hits"] for it in self.stats()["tiers"]]

    def marks(self) -> dict[str, int]:
        return find(get(f"http://127.0.0.1:{self.http}/status"), "marks")

    def written(self, more_than: int, meanwhile: Callable[[], object] = lambda: None) -> int:
        """Waits until all that was computed is on the tiers; how many chunks were stored."""
        end, last = time.monotonic() + SOON, -1
        while True:
            meanwhile()
            stats = self.stats()
            if stats["stored"] == last > more_than and stats["pending_writes"] == 0:
                return last
            assert time.monotonic() < end, stats
            last = stats["stored"]
            time.sleep(1.0)

    def forget(self) -> None:
        """Empties L1: what is found then comes from L2."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)


class Shared:
    """What one test leaves to the next."""

    server: Server
    engine: Vllm
    computed: list[list[int]]


def connector(**other: Any) -> dict[str, Any]:
    words = quick_start.command("LMCache", "vllm serve")
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = transfer["kv_connector_extra_config"]
    assert transfer["kv_connector"] == "LMCacheMPConnector" and extra["lmcache.mp.port"] == 5555, transfer
    extra |= {"lmcache.mp.port": Shared.server.rpc, "lmcache.mp.mq_timeout": 60.0, **other}
    return {**transfer, "kv_connector_module_path": "lmcache_cpu"}


def marking() -> dict[str, Any]:
    """As the README has it, in the module that mends the processor's."""
    import lmcache_cpu

    words = quick_start.command(MARKED, "vllm serve")
    marked = json.loads(words[words.index("--kv-transfer-config") + 1])
    module = marked.pop("kv_connector_module_path")
    plain = quick_start.command("LMCache", "vllm serve")
    assert marked == json.loads(plain[plain.index("--kv-transfer-config") + 1]), "there is one more line, no other"
    assert lmcache_cpu.MarkingConnector is getattr(importlib.import_module(module), marked["kv_connector"])
    return {**connector(), "kv_connector": "MarkingConnector"}


def compute() -> None:
    """Forward passes, of fewer tokens than are stored."""
    Shared.engine.say([PROMPTS[0][: TOKENS // 2]], count=4)


def test_tokens_from_l2_are_those_that_were_computed_and_both_tiers_served() -> None:
    model = make(HOME / "model")
    Shared.server.ready()
    engine = Shared.engine = Vllm(model, marking(), enable_prefix_caching=False)
    said = engine.say(PROMPTS)
    Shared.computed = [it.tokens for it in said]
    assert len({tuple(it) for it in Shared.computed}) == len(PROMPTS)
    assert Shared.server.hits() == [0, 0]
    Shared.server.written(0, meanwhile=compute)
    closed = Shared.server.marks()["steps_closed"]
    # On a busy machine a step may take too long to be known as whole.
    for _ in range(5):
        Shared.server.forget()
        said = engine.say(PROMPTS)
        assert [it.tokens for it in said] == Shared.computed
        if Shared.server.marks()["steps_closed"] > closed:
            break
    else:
        raise AssertionError(Shared.server.marks())
    assert all(it.cached >= len(prompt) - 1 - TOKENS for it, prompt in zip(said, PROMPTS, strict=True))
    assert all(count > 0 for count in Shared.server.hits()), Shared.server.hits()


def is_held(seed: int) -> bool:
    """Whether new chunks are not written while nothing computes."""
    server = Shared.server
    before = server.stats()["stored"]
    Shared.engine.say(prompts(seed, lengths=(700,)), count=1)
    end = time.monotonic() + SOON
    while server.stats()["stored"] < before + 700 // TOKENS or server.marks()["forward_passes"]:
        assert time.monotonic() < end, (server.stats(), server.marks())
        time.sleep(0.1)
    pending = server.stats()["pending_writes"]
    time.sleep(1.0)
    return 0 < pending == server.stats()["pending_writes"]


def test_writes_wait_for_forward_passes_that_the_connector_marks() -> None:
    server = Shared.server
    # On a busy machine the end of a pass may be known late.
    assert any(is_held(seed) for seed in range(8, 12))
    marks = server.marks()
    assert (marks["senders"], marks["refused"]) == (1, 0), marks
    server.written(0, meanwhile=compute)
    assert server.marks()["marks"] > marks["marks"]


def test_damage_on_both_tiers_is_found_counted_and_computed_again() -> None:
    server, engine = Shared.server, Shared.engine
    assert all(damage(HOME / tier) for tier in quick_start.TIERS)
    server.forget()
    said = engine.say(PROMPTS)
    assert [it.tokens for it in said] == Shared.computed
    stats = server.stats()
    assert all(it["corrupt_reads"] + it["lost_chunks"] > 0 for it in stats["tiers"]) and stats["misses"] > 0, stats
    assert all(it.cached == 0 for it in said), [it.cached for it in said]
    engine.close()
    end = time.monotonic() + SOON
    while server.marks()["senders"]:
        assert time.monotonic() < end, "no farewell"
        time.sleep(0.1)


def test_a_model_with_two_groups_of_blocks_gives_the_same_tokens() -> None:
    server = Shared.server
    model = make_hybrid(HOME / "hybrid")
    settings = {"enable_prefix_caching": False, "disable_hybrid_kv_cache_manager": False}
    plain = Vllm(model, None, **settings)
    assert len(plain.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    computed = [it.tokens for it in plain.say(PROMPTS)]
    plain.close()
    # The other way of transfer takes one group only.
    driven = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
    engine = Vllm(model, connector(**driven), **settings)
    assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    before = server.stats()
    assert [it.tokens for it in engine.say(PROMPTS)] == computed
    server.written(before["stored"])
    server.forget()
    said = engine.say(PROMPTS)
    assert [it.tokens for it in said] == computed and all(it.cached > 0 for it in said), [it.cached for it in said]
    assert server.stats()["hits"] > before["hits"]
    engine.close()


def used(directory: Path) -> int:
    """Bytes of all files below; directories are not counted by a cap."""
    total = 0
    for it in directory.rglob("*"):
        try:
            total += 0 if it.is_dir() else it.stat().st_blocks * 512
        except FileNotFoundError:
            pass  # just removed
    return total


def test_four_worker_processes_share_one_cap() -> None:
    server = Shared.server
    before = server.stats()
    urls = [f"tcp://127.0.0.1:{server.rpc}", f"http://127.0.0.1:{server.http}"]
    # More than a tier may hold: each sequence has 2 MiB.
    command = [sys.executable, str(Path(__file__).with_name("four_clients.py")), *urls, "40"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    server.written(before["stored"])
    stats = server.stats()
    assert sum(it["evictions"] for it in stats["tiers"]) > 0, stats
    # One of the tiers makes room ahead, the other behind.
    end = time.monotonic() + SOON
    while any(used(HOME / name) > CAP for name in quick_start.TIERS):
        assert time.monotonic() < end, [used(HOME / name) for name in quick_start.TIERS]
        time.sleep(0.5)
    stats = server.stats()
    assert all(it["used_bytes"] <= it["capacity_bytes"] == CAP for it in stats["tiers"]), stats


if __name__ == "__main__":
    Shared.server = Server()
    try:
        run(globals())
    finally:
        Shared.server.stop()
        shutil.rmtree(HOME, ignore_errors=True)
