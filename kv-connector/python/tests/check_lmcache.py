"""A real LMCache over the L2 adapter: its own judges, and what they do not ask."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import kvbraid
import lmcache_aborts
import lmcache_crowd
import lmcache_marks
from harness import config, namespace, raises, run
from lmcache_rig import SIZE, Memory, adapter, load, lookup, object_key, payload, spec, store

LMCACHE = str(Path(sys.executable).with_name("lmcache"))
ENVIRONMENT = {**os.environ, "LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}


def judged(*command: str) -> str:
    """What a command of LMCache says; it must end by itself, and well."""
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout + ended.stderr


# LMCache's own judges.


def test_bench_l2_verifies_every_key(directory: Path) -> None:
    out = directory / "bench.json"
    arguments = "--num-keys 32 --in-flight 4 --data-size-kb 512 --rounds 2 --l1-align-bytes 4096 --no-skip-verify"
    arguments += " --lookup-max-hit-rate 1.0 --format json"
    adapter = spec(config(directory))
    judged(LMCACHE, "bench", "l2", "--l2-adapter", adapter, *arguments.split(), "--output", str(out))
    metrics = json.loads(out.read_text())["metrics"]
    operations = {it["operation"]: it for name, it in metrics.items() if name.startswith("op_")}
    assert set(operations) == {"Store", "Lookup", "Load"}
    for name, it in operations.items():
        assert it["total_success"] == it["total_keys"] > 0 and it["rounds_timed_out"] == 0, (name, it)


def test_basic_check_passes_in_every_row(directory: Path) -> None:
    command = [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", "16"]
    command += ["--obj-size", "524288", "--kv-dtype", "bfloat16", "--l2-adapter", spec(config(directory))]
    rows = re.findall(r"^\| ([A-Z][A-Z ()a-z]+?) +\|.*\| +(\d+)/(\d+) \|", judged(*command), re.MULTILINE)
    assert len(rows) == 4, rows
    assert all(passed == wanted != "0" for _, passed, wanted in rows), rows


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for it in sockets:
        it.bind(("127.0.0.1", 0))
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def find(value: Any, key: str) -> Any:
    """The first value of this key, however deep."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for it in value:
            found = find(it, key)
            if found is not None:
                return found
    return None


def test_bench_server_reads_back_what_it_stored(directory: Path) -> None:
    rpc, http = free_ports(2)
    command = [LMCACHE, "server", "--host", "127.0.0.1", "--port", str(rpc), "--http-host", "127.0.0.1", "--http-port", str(http)]
    command += "--disable-metrics --l1-size-gb 1 --no-l1-use-lazy --eviction-policy LRU --max-workers 2".split()
    command += "--supported-transfer-mode auto --l2-store-policy skip_l1 --l2-prefetch-max-in-flight 64".split()
    command += ["--shm-name", f"kvbraid-{os.getpid()}", "--l2-adapter", spec(config(directory, chunk="4 MiB"))]
    trace = directory / "server.lct"
    command += ["--trace-level", "storage", "--trace-output", str(trace)]
    log = directory / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 150
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            try:
                get(f"http://127.0.0.1:{http}/status")
                break
            except OSError:
                time.sleep(0.2)
        lmcache_marks.unheard(f"tcp://127.0.0.1:{rpc}")
        bench = [LMCACHE, "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{rpc}", "--url", f"http://127.0.0.1:{http}"]
        bench += "--mode cpu --num-tokens 1024 --end 4 --interval 0.1 --kvcache-shape-spec".split()
        said = judged(*bench, "(2,256,16,2,64):bfloat16:4")
        found = {name: int(n) for name, n in re.findall(r"(Total requests|Checksum OK|Checksum FAIL)\D+(\d+)", said)}
        assert found == {"Total requests": 4, "Checksum OK": 4, "Checksum FAIL": 0}, said[-3000:]
        status = get(f"http://127.0.0.1:{http}/status")
        stats = find(status, "stats")
        assert stats["stored"] >= 16 and stats["hits"] >= 16 and stats["misses"] == 0, stats
        listed = get(f"http://127.0.0.1:{http}/cache/objects?page_size=5")
        assert len(listed["entries"]) == 5 and listed["next_page_token"], listed
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    assert server.returncode in (0, -signal.SIGTERM), f"{server.returncode}: {log.read_text()[-2000:]}"
    replayed(directory, trace)


def replayed(directory: Path, trace: Path) -> None:
    """Every call that a server made is made again, over fresh tiers."""
    fresh, out = directory / "fresh", directory / "replay"
    fresh.mkdir()
    command = [LMCACHE, "trace", "replay", str(trace), "--json", "--no-csv", "--output-dir", str(out)]
    command += ["--jsonl-out", str(out / "records.jsonl"), "--disable-metrics", "--l1-size-gb", "1", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--l2-store-policy", "skip_l1", "--l2-prefetch-max-in-flight", "64"]
    judged(*command, "--l2-adapter", spec(config(fresh, chunk="4 MiB")))
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    calls = {it["qualname"].rsplit(".", 1)[-1] for it in records}
    assert len(records) >= 20 and {"reserve_write", "finish_write", "submit_prefetch_task"} <= calls, calls
    assert not any(it["failed"] for it in records), records
    # A segment is made with the first chunk that is written into it.
    assert {path.parent.name for path in fresh.rglob("seg-*.kvb")} == {"fast", "slow"}, "nothing was stored"


# What they do not ask.


def test_a_namespace_is_mandatory_and_builtin_hashes_do_not_persist(directory: Path) -> None:
    without = {name: it for name, it in config(directory).items() if name != "namespace"}
    raises(kvbraid.ConfigError, "namespace: is missing", adapter, without)
    builtin = {**config(directory), "namespace": namespace(hash_algorithm="builtin")}
    raises(kvbraid.ConfigError, "builtin", adapter, builtin)
    raises(kvbraid.ConfigError, "weights", adapter, {**config(directory), "namespace": namespace(weights="")})
    raises(kvbraid.ConfigError, "config: is missing", adapter, "")
    memory = {"engine": {"host_cache": "0 B", "staging": "16 MiB"}, "namespace": namespace(hash_algorithm="builtin")}
    adapter({**memory, "tier": [{"name": "m", "kind": "memory", "capacity": "32 MiB"}]}).close()


def test_what_one_server_stored_the_next_one_serves_and_another_namespace_does_not(directory: Path) -> None:
    count = 40
    keys, contents = [object_key(n) for n in range(count)], [payload(n) for n in range(count)]
    made = adapter(config(directory))
    assert store(made, keys, contents) and made._engine.flush(30)
    made.close()
    for field, value in (("dtype", "float16"), ("weights", "2"), ("hash_seed", "1"), ("serde", "fp8"), ("engine_major", 1)):
        other = adapter({**config(directory), "namespace": namespace(**{field: value})})
        assert not any(lookup(other, keys)) and not any(load(other, keys)[0]), field
        other.close()
    made = adapter(config(directory))
    assert all(lookup(made, keys))
    served: list[int] = []
    # On a busy machine one tier's thread may have read all of so little before the other's runs.
    for _ in range(20):
        hits, found = load(made, keys)
        assert all(hits) and found == contents
        served = [tier["hits"] for tier in made.report_status()["stats"]["tiers"]]
        if all(served):
            break
    assert all(served), f"chunks served by each tier: {served}"
    others = [object_key(0, model_name="b"), object_key(0, cache_salt="x"), object_key(0, object_group_id=1)]
    others += [object_key(0, kv_rank=0x02010201), object_key(0, chunk_hash=b"1234"), object_key(0, chunk_hash=bytes(65))]
    assert not any(lookup(made, others)) and not any(load(made, others)[0])
    made.close()


def test_a_store_larger_than_staging_ends_when_all_is_copied(directory: Path) -> None:
    count = 60
    keys, contents = [object_key(n) for n in range(count)], [payload(n) for n in range(count)]
    made = adapter(config(directory, staging="8 MiB"))
    assert store(made, keys, contents)
    hits, found = load(made, keys)
    assert all(hits) and found == contents
    assert not store(made, [object_key(99)], [bytes(2 << 20)]), "no chunk is that large"
    made.close()


def test_requests_with_common_keys_read_them_once(directory: Path) -> None:
    keys = [object_key(n) for n in range(8)]
    made = adapter({**config(directory), "queue": {"gather_us": 200_000}})
    assert store(made, keys, [payload(n) for n in range(8)]) and made._engine.flush(30)
    objects = [[Memory(SIZE) for _ in keys] for _ in range(6)]
    tasks = [made.submit_load_task(keys, it) for it in objects]
    for task, memory in zip(tasks, objects, strict=True):
        end = time.monotonic() + 30
        while (bits := made.query_load_result(task)) is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert bits.popcount() == 8 and [bytes(it.content) for it in memory] == [payload(n) for n in range(8)]
    assert made.report_status()["stats"]["wanted"] == 8
    made.close()


def test_locks_are_counted_and_delete_honours_them(directory: Path) -> None:
    keys = [object_key(n) for n in range(3)]
    made = adapter(config(directory))
    assert store(made, keys, [payload(n) for n in range(3)]) and made._engine.flush(30)
    assert made.get_usage().total_bytes_used == 3 * SIZE
    assert lookup(made, keys[:2]) == [True, True] and lookup(made, keys[:1]) == [True]
    made.delete(keys)
    assert made.get_usage().total_bytes_used == 2 * SIZE
    made.submit_unlock(keys)
    made.submit_unlock(keys[1:])
    made.delete(keys)
    assert made.get_usage().total_bytes_used == SIZE
    page = made.list_l2_keys(model_name="a/model")
    assert [it.key.to_object_key() for it in page.entries] == keys[:1] and page.next_page_token is None
    assert made.list_l2_keys(model_name="other").entries == ()
    made.submit_unlock(keys)
    made.delete(keys)
    assert made.get_usage().total_bytes_used == 0 and not any(lookup(made, keys))
    made.close()


def test_pages_of_the_list_are_all_of_it(directory: Path) -> None:
    keys = {object_key(n, cache_salt="s" if n % 2 else "") for n in range(23)}
    made = adapter(config(directory))
    assert store(made, list(keys), [payload(n) for n in range(23)])
    listed, cursor = [], None
    while True:
        page = made.list_l2_keys(page_size=5, cursor=cursor)
        listed += [it.key.to_object_key() for it in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            break
    assert len(listed) == 23 and set(listed) == keys
    assert dict(made.get_usage().bytes_by_cache_salt) == {"": 12 * SIZE, "s": 11 * SIZE}
    raises(ValueError, "page_size", made.list_l2_keys, page_size=0)
    raises(ValueError, "cursor", made.list_l2_keys, cursor="zz")
    made.close()


def test_requests_that_are_aborted_cost_the_others_nothing(directory: Path) -> None:
    keys = [object_key(n) for n in range(16)]
    made = adapter({**config(directory), "queue": {"memory": "16 MiB", "keep_ms": 100}})
    assert store(made, keys, [payload(n) for n in range(16)]) and made._engine.flush(30)
    for turn in range(200):
        some = keys[turn % 8 : turn % 8 + 8]
        assert all(lookup(made, some))
        aborted = [Memory(SIZE) for _ in some]
        made.submit_load_task(some, aborted)
        made.submit_unlock(some)
        assert all(bytes(it.content) == bytes(SIZE) for it in aborted[:1]), "written without being asked"
    hits, found = load(made, keys)
    assert all(hits) and found == [payload(n) for n in range(16)]
    assert made.report_status()["stats"]["chunks_locked"] == 0
    made.close()


def test_the_fault_wrapper_of_lmcache_drops_what_it_says_and_no_more(directory: Path) -> None:
    keys = [object_key(n) for n in range(12)]
    made = adapter(config(directory), type="fault_inject", gap_indices=[3])
    assert store(made, keys, [payload(n) for n in range(12)])
    expected = [n != 3 for n in range(12)]
    assert all(lookup(made, keys))
    hits, found = load(made, keys)
    assert hits == expected and all(found[n] == payload(n) for n in range(12) if n != 3)
    made.close()


def test_closed_twice_and_used_afterwards(directory: Path) -> None:
    made = adapter(config(directory))
    assert store(made, [object_key(1)], [payload(1)])
    made.close()
    made.close()
    assert not made.report_status()["is_healthy"]
    raises(kvbraid.ClosedError, "closed", made.submit_lookup_and_lock_task, [object_key(1)], {})
    raises(kvbraid.ClosedError, "closed", made.submit_load_task, [object_key(1)], [Memory(SIZE)])
    raises(kvbraid.ClosedError, "closed", made.submit_store_task, [object_key(1)], [Memory(SIZE)])


if __name__ == "__main__":
    run({**vars(lmcache_aborts), **vars(lmcache_crowd), **vars(lmcache_marks), **globals()})
