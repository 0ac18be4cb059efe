"""The README's vLLM quick start, as it stands there: only the processor takes the GPU's place, and this machine's paths and sizes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import quick_start
import vllm_cpu
from check_lmcache import free_ports
from harness import run
from tiny_model import make

HERE = Path(__file__).resolve().parent
HOME = Path(tempfile.mkdtemp(prefix="kvbraid-start-"))
TOKENS = 1900
"""Of a prompt; a letter is one."""
CHUNK_TOKENS = 64
TEXTS = ["".join(chr(97 + (n * step + n // 7) % 26) for n in range(TOKENS)) for step in (1, 3, 5, 7, 9, 11)]
CHUNKS = len(TEXTS) * (TOKENS // CHUNK_TOKENS)
"""Some ten megabytes: one tier does not read all of it before the other begins."""
MEMORY = 128 << 20
"""vLLM's own, on the device and as primary tier: all prompts."""
UP_S = 900.0
"""Some fifty seconds on a machine of two cores that does nothing else; imports are most of it."""


def command(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The README's command, and its environment."""
    words = quick_start.command("vLLM", "PYTHONHASHSEED")
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    assert words[:3] == ["vllm", "serve", "MODEL"], words
    arguments = words[3:]
    place = arguments.index("--kv-transfer-config") + 1
    transfer = json.loads(arguments[place])
    extra = transfer["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    extra |= {"spec_name": "CPUTieringSpec", "spec_module_path": "cpu_offload", "cpu_bytes_to_use": MEMORY}
    extra["secondary_tiers"][0]["config"] = str(quick_start.configuration("vLLM", HOME, capacity="512 MiB"))
    extra["block_size"] = CHUNK_TOKENS
    arguments[place] = json.dumps(transfer)
    # In single precision tokens do not depend on which requests share a batch.
    processor = f"--host 127.0.0.1 --port {port} --dtype float32 --block-size 32 --max-model-len 2048 --enforce-eager"
    processor += f" --max-num-seqs 8 --kv-cache-memory-bytes {MEMORY}"
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [*module, *arguments, *processor.split()], variables


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def complete(port: int) -> list[str]:
    body = {"model": str(HOME / "model"), "prompt": TEXTS, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    choices = json.loads(ask(port, "/v1/completions", body))["choices"]
    assert len(choices) == len(TEXTS)
    return [it["text"] for it in sorted(choices, key=lambda it: it["index"])]


def metric(port: int, name: str) -> float:
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? ([0-9.e+]+)$", ask(port, "/metrics"), re.MULTILINE)
    assert values, f"vLLM has no {name}"
    return sum(map(float, values))


def stats() -> dict[str, Any]:
    """What `kvbraid stat` asks a running engine."""
    with socket.socket(socket.AF_UNIX) as it:
        it.settimeout(10)
        it.connect(str(HOME / "sock"))
        it.sendall(b"stats\n")
        return json.load(it.makefile())


def until(condition: Any, limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def test_the_quick_start_serves_its_first_hits_from_both_tiers() -> None:
    model = make(HOME / "model")
    (port,) = free_ports(1)
    arguments, variables = command(model, port)
    environment = {**os.environ, **vllm_cpu.ENVIRONMENT, **variables}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(path)}
    log = HOME / "log"
    with log.open("w") as out:
        server = subprocess.Popen(arguments, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def up() -> bool:
        assert server.poll() is None, log.read_text()[-5000:]
        try:
            ask(port, "/health")
            return True
        except OSError:
            return False

    try:
        until(up, UP_S, "the server does not come up")
        begun = time.monotonic()
        computed = complete(port)
        assert len(set(computed)) == len(TEXTS) and metric(port, "vllm:external_prefix_cache_hits_total") == 0

        def written() -> bool:
            # A step sends the stores of the one before.
            ask(port, "/v1/completions", {"model": str(model), "prompt": "x", "max_tokens": 2})
            now = stats()
            return now["stored"] >= CHUNKS and now["pending_writes"] == 0

        until(written, 120, f"not all is written: {stats()}")
        served = [0, 0]
        # On a busy machine a tier's thread may yet come too late for a step.
        for _ in range(10):
            assert json.loads(ask(port, "/reset_prefix_cache?reset_external=true", {}))["success"]
            said = complete(port)
            assert said == computed, (said, computed)
            served = [it["hits"] for it in stats()["tiers"]]
            if all(served):
                break
        assert all(served), served
        assert metric(port, "vllm:external_prefix_cache_hits_total") >= CHUNKS * CHUNK_TOKENS
        print(f"FIGURE first completions to first hits from both tiers: {time.monotonic() - begun:.1f} s", flush=True)
    except BaseException:
        print(log.read_text()[-5000:])
        raise
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)


if __name__ == "__main__":
    try:
        run(globals())
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
