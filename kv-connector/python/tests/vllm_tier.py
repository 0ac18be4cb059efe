"""The tier without an engine around it: what vLLM's manager does to it, done by hand."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import config as any_config
from harness import raises
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import kvbraid

SIZE = 64 << 10
SOON = 30.0
KNOWN = {"weights": "w", "layout": "l", "hash_algorithm": "sha256_cbor", "hash_seed": "none"}
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def config(directory: Path, **engine: object) -> dict[str, Any]:
    """Two persistent tiers for chunks of this size, and memory for whole steps."""
    return {**any_config(directory, **{"chunk": "64 KiB", **engine}), "queue": {"memory": "32 MiB"}}  # type: ignore[arg-type]


def spec(replica: int = 0) -> Any:
    """What vLLM gives a tier, of a model of one layer."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, replica, 2, None, True)
    return SimpleNamespace(
        config=OffloadingConfig(
            groups=(OffloadingGroupConfig(32, ("layer.0",), 0),),
            worker_kv_bytes_per_block=SIZE,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="e",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=parallel,
            kv_cache_layout="LBHNC",
        )
    )


def key(n: int, group: int = 0) -> OffloadKey:
    return make_offload_key(hashlib.sha256(n.to_bytes(8, "big")).digest(), group)


def payload(n: int) -> bytes:
    return hashlib.shake_128(n.to_bytes(8, "big")).digest(SIZE)


class Hand:
    """vLLM's manager, as far as one tier sees it: 256 slots of memory, and job numbers."""

    def __init__(self, configuration: object, namespace: dict[str, Any] | None = None, **other: Any) -> None:
        self.mapping = mmap.mmap(-1, 256 * SIZE)
        self.memory = np.frombuffer(self.mapping, dtype=np.int8).reshape(256, SIZE)
        self.view = memoryview(self.memory)
        entry = {"type": "Tier", "module_path": "kvbraid.vllm", "config": configuration, **other}
        if namespace is not None:
            entry["namespace"] = namespace
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(entry, self.view, spec())
        self.numbers = itertools.count()

    def job(self, keys: list[OffloadKey], slots: list[int], *, load: bool, request: ReqContext) -> int:
        number = next(self.numbers)
        job = TransferJob(number, keys, np.array(slots, dtype=np.int32), load, request)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return number

    def finished(self, count: int) -> dict[int, JobResult]:
        results: dict[int, JobResult] = {}
        end = time.monotonic() + SOON
        while len(results) < count:
            assert time.monotonic() < end, "a job does not end"
            results |= {it.job_id: it for it in self.tier.get_finished_jobs()}
        assert len(results) == count
        return results

    def store(self, numbers: range) -> None:
        for slot, n in enumerate(numbers):
            self.memory[slot] = np.frombuffer(payload(n), dtype=np.int8)
        job = self.job([key(n) for n in numbers], list(range(len(numbers))), load=False, request=ReqContext("store"))
        result = self.finished(1)[job]
        assert result.success and result.transfer_bytes == len(numbers) * SIZE
        assert self.tier._engine.flush(SOON)
        self.memory[:] = 0

    def step(self) -> None:
        self.tier.on_schedule_end(STEP)

    def holds(self, slot: int, n: int) -> bool:
        return self.memory[slot].tobytes() == payload(n)


def request(name: str, numbers: range) -> ReqContext:
    context = ReqContext(name)
    for place, n in enumerate(numbers):
        context.set_offload_key_position(key(n), 32 * (place + 1))
    return context


def test_all_loads_of_a_step_are_one_pool_and_nothing_begins_before_its_end(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(100))
    jobs = []
    for n in range(5):
        keys = [key(it) for it in range(20 * n, 20 * n + 20)]
        jobs.append(hand.job(keys, list(range(20 * n, 20 * n + 20)), load=True, request=ReqContext(str(n))))
    time.sleep(0.05)
    assert not list(hand.tier.get_finished_jobs()) and hand.tier._engine.stats()["steps"] == 0
    hand.step()
    results = hand.finished(5)
    assert all(results[job].success and results[job].transfer_bytes == 20 * SIZE for job in jobs)
    assert all(hand.holds(n, n) for n in range(100))
    stats = hand.tier._engine.stats()
    assert (stats["steps"], stats["hits"]) == (1, 100) and all(it["hits"] > 0 for it in stats["tiers"])
    hand.tier.shutdown()


def test_no_result_is_lost_whenever_its_job_ends(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(8))
    for _ in range(300):
        for n in range(8):
            hand.job([key(n)], [n], load=True, request=ReqContext("r"))
        hand.step()
        assert all(it.success for it in hand.finished(8).values())
    hand.tier.shutdown()


def test_a_thousand_lookups_of_a_step_ask_the_engine_a_few_times(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(200))
    contexts = [request(str(n), range(250)) for n in range(4)]
    for context in contexts:
        found = [hand.tier.lookup(key(n), context) for n in range(250)]
        assert found == [LookupResult.HIT] * 200 + [LookupResult.MISS] * 50
    stats = hand.tier._engine.stats()
    assert stats["lookups"] <= 8, stats["lookups"]
    # The next step asks anew: nothing is believed longer.
    hand.step()
    assert hand.tier._engine.delete(hand.tier._chunks.keys([key(0)])) == [True]
    assert hand.tier.lookup(key(0), contexts[0]) is LookupResult.MISS
    hand.tier.shutdown()


def test_what_cannot_be_loaded_is_told_and_no_hit_again_for_this_request(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(10))
    context = request("r", range(12))
    assert hand.tier.lookup(key(9), context) is LookupResult.HIT
    damage(directory, every=SIZE // 2)
    job = hand.job([key(n) for n in range(10)], list(range(10)), load=True, request=context)
    gone = hand.job([key(10)], [10], load=True, request=context)
    hand.step()
    results = hand.finished(2)
    assert not results[job].success and not results[job].successful_keys and not results[gone].success
    hand.store(range(10))
    assert all(hand.tier.lookup(key(n), context) is LookupResult.MISS for n in range(10))
    assert hand.tier.lookup(key(0), request("other", range(10))) is LookupResult.HIT
    hand.tier.shutdown()


def test_of_a_job_with_one_damaged_chunk_the_others_are_used(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(10))
    absent = key(77)
    keys = [key(0), absent, *(key(n) for n in range(1, 10))]
    job = hand.job(keys, [0, 50, *range(1, 10)], load=True, request=ReqContext("r"))
    hand.step()
    result = hand.finished(1)[job]
    assert not result.success and set(result.successful_keys) == {key(n) for n in range(10)}
    assert all(hand.holds(n, n) for n in range(10)) and not hand.memory[50].any()
    hand.tier.shutdown()


def test_draining_ends_every_job_also_those_of_a_step_that_has_not_ended(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(10))
    jobs = [hand.job([key(n)], [n], load=True, request=ReqContext("r")) for n in range(4)]
    hand.step()
    jobs.append(hand.job([key(5)], [5], load=True, request=ReqContext("r")))
    jobs.append(hand.job([key(20)], [0], load=False, request=ReqContext("r")))
    hand.tier.drain_jobs()
    results = {it.job_id: it.success for it in hand.tier.get_finished_jobs()}
    assert set(results) == set(jobs) and not results[jobs[4]] and all(results[it] for it in jobs[:4])
    hand.step()
    assert not list(hand.tier.get_finished_jobs())
    hand.tier.shutdown()


def test_after_a_shutdown_nobody_has_vllms_memory_and_every_call_is_harmless(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(10))
    context = request("r", range(10))
    hand.job([key(n) for n in range(10)], list(range(10)), load=True, request=context)
    hand.step()
    hand.tier.shutdown()
    hand.view.release()
    hand.memory = np.zeros((1, 1), dtype=np.int8)
    # Fails while anybody has it.
    hand.mapping.close()
    assert hand.tier.lookup(key(0), context) is LookupResult.MISS
    hand.job([key(0)], [0], load=True, request=context)
    hand.step()
    hand.job([key(0)], [0], load=False, request=context)
    assert [it.success for it in hand.finished(2).values()] == [False, False]
    hand.tier.drain_jobs()
    hand.tier.shutdown()


def test_chunks_of_another_node_are_found_by_asking_again(directory: Path) -> None:
    tier = {"name": "all", "kind": "shared", "path": str(directory / "all"), "capacity": "256 MiB"}
    both = {**config(directory), "tier": [tier]}
    both["engine"] = {**both["engine"], "lookup_wait_ms": 20_000}  # type: ignore[dict-item]
    first, second = Hand(both, KNOWN), Hand(both, KNOWN)
    first.store(range(3))
    context = request("r", range(4))
    end = time.monotonic() + SOON
    while LookupResult.RETRY in (found := [second.tier.lookup(key(n), context) for n in range(4)]):
        assert time.monotonic() < end
        second.step()
    assert found == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    # Asked once for all of them, and no more for this request.
    first.store(range(4))
    second.step()
    assert second.tier.lookup(key(3), context) is LookupResult.MISS
    first.tier.shutdown()
    second.tier.shutdown()


def test_groups_and_namespaces_are_kept_apart(directory: Path) -> None:
    hand = Hand(config(directory), KNOWN)
    hand.store(range(3))
    assert hand.tier.lookup(key(0, group=1), ReqContext("r")) is LookupResult.MISS
    hand.tier.shutdown()
    for other in ({"weights": "x"}, {"layout": "x"}, {"hash_seed": "x"}, {"dtype": "x"}, {"extra": {"lora": "x"}}):
        hand = Hand(config(directory), {**KNOWN, **other})
        assert hand.tier.lookup(key(0), ReqContext("r")) is LookupResult.MISS, other
        hand.tier.shutdown()
    hand = Hand(config(directory), KNOWN)
    assert hand.tier.lookup(key(0), ReqContext("r")) is LookupResult.HIT
    hand.tier.shutdown()


def test_what_is_not_known_of_the_model_is_shared_with_nobody(directory: Path) -> None:
    # No vLLM is around here, so nothing but what is given is known.
    hand = Hand(config(directory))
    hand.store(range(3))
    assert hand.tier.lookup(key(0), ReqContext("r")) is LookupResult.HIT
    hand.tier.shutdown()
    hand = Hand(config(directory))
    assert hand.tier.lookup(key(0), ReqContext("r")) is LookupResult.MISS
    hand.tier.shutdown()


def test_bad_parameters_name_the_field_and_the_fix(directory: Path) -> None:
    wrong = kvbraid.ConfigError
    raises(wrong, "config is missing", Hand, None)
    raises(wrong, "pools: write config", Hand, config(directory), KNOWN, pools=1)
    raises(wrong, "namespace: colour", Hand, config(directory), {"colour": "red"})
    raises(wrong, 'chunk_bytes_max: 4096 bytes do not hold a chunk of this model; write "64 KiB"', Hand,
           config(directory, chunk="4 KiB"), KNOWN)
    raises(wrong, "/nowhere/1.toml", SecondaryTierFactory.create_secondary_tier,
           {"type": "Tier", "module_path": "kvbraid.vllm", "config": "/nowhere/{data_parallel_index}.toml"},
           memoryview(np.zeros((2, SIZE), dtype=np.int8)), spec(replica=1))
    # Nothing stays open after a refusal.
    Hand(config(directory), KNOWN).tier.shutdown()


def test_hashes_that_differ_from_process_to_process_are_refused_with_tiers_that_outlive_one() -> None:
    from kvbraid.vllm.namespace import _hash_seed

    seed = os.environ.pop("PYTHONHASHSEED", None)
    try:
        assert _hash_seed("sha256", True) == _hash_seed("sha256_cbor", True) == "none"
        for random in ("xxhash", "xxhash_cbor", "builtin"):
            raises(kvbraid.ConfigError, "PYTHONHASHSEED: is not set", _hash_seed, random, True)
            assert _hash_seed(random, False) != _hash_seed(random, False)
        os.environ["PYTHONHASHSEED"] = "0"
        assert _hash_seed("xxhash", True) == "PYTHONHASHSEED=0"
    finally:
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed


def damage(directory: Path, every: int = 16 << 10) -> int:
    """Flips a byte in `every` so many of all large files below; the number of them."""
    flipped = 0
    for path in directory.rglob("*"):
        if not path.is_file() or path.stat().st_size < SIZE:
            continue
        with path.open("r+b") as file:
            for place in range(every // 3, path.stat().st_size, every):
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 0xFF]))
                flipped += 1
            file.flush()
            os.fsync(file.fileno())
    return flipped
