"""LMCache's server with one L2 adapter, beside a vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

UP_S = 600.0
WAIT_S = 120.0


class Server:
    """On loopback; begins at once, and is up a while later."""

    def __init__(self, home: Path, name: str, chunk_tokens: int, l1_gb: float, adapter: dict[str, Any]) -> None:
        self.rpc, self.http = _free_ports(2)
        command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(self.rpc)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self.http), "--shm-name", f"kvbraid-{os.getpid()}"]
        command += ["--disable-metrics", "--chunk-size", str(chunk_tokens), "--l1-size-gb", str(l1_gb), "--no-l1-use-lazy"]
        # What is in L2 is read from there: L1 is a buffer.
        command += "--eviction-policy LRU --l2-store-policy skip_l1 --l2-prefetch-max-in-flight 64".split()
        command += ["--max-workers", "2", "--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(adapter)]
        self._log = home / f"{name}-server.log"
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def connector(self) -> dict[str, Any]:
        """What vLLM is given, once it is up."""
        end = time.monotonic() + UP_S
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server is not up: {self._log.read_text()[-2000:]}")
            try:
                self.status()
                break
            except OSError:
                time.sleep(0.2)
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.rpc, "lmcache.mp.mq_timeout": 60.0}
        # Copies go through shared memory.
        extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache_cpu",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def status(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=30) as answer:
            return json.load(answer)

    def settle(self) -> None:
        """Returns when all stores are on the devices."""
        end, calm = time.monotonic() + WAIT_S, 0
        while calm < 3:
            if time.monotonic() > end:
                raise TimeoutError("stores do not end")
            status = self.status()
            counts = ("pending_keys_count", "in_flight_task_count", "pending_writes")
            calm = 0 if any(it for key in counts for it in find_all(status, key)) else calm + 1
            time.sleep(0.2)

    def forget(self) -> None:
        """Empties L1."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


def find(value: Any, key: str) -> Any:
    """The first value of this key, however deep; None without one."""
    return next(iter(find_all(value, key)), None)


def find_all(value: Any, key: str) -> list[Any]:
    """All values of this key, however deep."""
    if isinstance(value, dict):
        own = [value[key]] if key in value else []
        return own + [it for inner in value.values() for it in find_all(inner, key)]
    if isinstance(value, list):
        return [it for inner in value for it in find_all(inner, key)]
    return []


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for it in sockets:
        it.bind(("127.0.0.1", 0))
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports
