"""A real SGLang host pool over the HiCache backend: pages out, wiped, back, and compared."""

from __future__ import annotations

import json
import os
import re
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvbraid
import torch
from harness import config, raises, run
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageConfig, PoolHitPolicy, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, LAYERS, HEADS, DIM = 16, 4, 2, 64
LOADER = {"backend_name": "kvbraid", "module_path": "kvbraid.sglang", "class_name": "HiCache", "interface_v1": 1}
WEIGHTS = "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920"


def host_pool(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, tokens: int = 4096) -> Any:
    device = MHATokenToKVPool(256, PAGE, dtype, HEADS, DIM, LAYERS, "cpu", False, enable_alt_stream=False)
    places = {"device_capacity_tokens": 256, "start_layer": 0, "end_layer": LAYERS}
    # SGLang wants 10 GB of the machine to itself otherwise.
    with host_memory_budget_scope(1 << 30):
        info = device._mha_buffer_info()
        return MHATokenToKVPoolHost(info, tokens / 256, 0, PAGE, layout, pin_memory=False, device="cpu", **places)


def two_tiers(directory: Path, **engine: object) -> dict[str, object]:
    """The usual two tiers; SGLang brings the namespace. On a busy machine a shared directory answers late."""
    whole = config(directory, lookup_wait_ms=5000, **engine)
    return {name: it for name, it in whole.items() if name != "namespace"}


def storage_config(configuration: object, **other: Any) -> HiCacheStorageConfig:
    extra = {**LOADER, "config": configuration, "weights": WEIGHTS, **other.pop("extra", {})}
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    return HiCacheStorageConfig(**{**ranks, **flags, "model_name": "a/model", "extra_config": extra, **other})


def backend(pool: Any, configuration: object, **other: Any) -> Any:
    """As SGLang's controller makes it."""
    made = StorageBackendFactory.create_backend("dynamic", storage_config(configuration, **other), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def fill(pool: Any, seed: int = 1) -> torch.Tensor:
    """Random bytes in all of the pool, and a copy of them."""
    raw = pool.kv_buffer.view(torch.uint8)
    raw.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return raw.clone()


def same(pool: Any, kept: torch.Tensor, first: int, count: int) -> bool:
    """Whether pages have the bytes that they had."""
    other = kept.view(pool.dtype)
    now, pool.kv_buffer = pool.kv_buffer, other
    pages = [pool.get_data_page((first + n) * PAGE).view(torch.uint8).clone() for n in range(count)]
    pool.kv_buffer = now
    return all(torch.equal(it, pool.get_data_page((first + n) * PAGE).view(torch.uint8)) for n, it in enumerate(pages))


def content(page: torch.Tensor) -> bytes:
    """Its bytes: as numbers some of them equal nothing."""
    return bytes(page.contiguous().view(torch.uint8).numpy())


def names(count: int, first: int = 0) -> list[str]:
    return [f"{n:064x}" for n in range(first, first + count)]


def places(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + count) * PAGE)


def served_by_both(made: Any, keys: list[str], indices: torch.Tensor) -> bool:
    """Reads until each tier has served something: of a small batch one may get everything on a busy machine."""
    for _ in range(100):
        if all(tier["hits"] > 0 for tier in made.get_stats().kvbraid["tiers"]):
            return True
        assert all(made.batch_get_v1(keys, indices))
    return False


def test_pages_of_every_layout_come_back_from_both_tiers_after_a_restart(directory: Path) -> None:
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        where = directory / layout
        where.mkdir()
        pool, keys = host_pool(layout), names(64)
        made = backend(pool, two_tiers(where))
        kept = fill(pool)
        assert made.batch_exists(keys) == 0
        assert made.batch_set_v1(keys, places(3, 64)) == [True] * 64
        assert made.batch_exists([*keys, "not stored"]) == 64, "readable as soon as it is staged"
        made.close()
        made = backend(pool, two_tiers(where))
        pool.kv_buffer.zero_()
        assert made.batch_exists([*keys[:40], "not stored", *keys[40:]]) == 40
        assert made.batch_get_v1(keys, places(3, 64)) == [True] * 64
        assert same(pool, kept, 3, 64), layout
        assert served_by_both(made, keys, places(3, 64))
        outside = pool.get_data_page(0), pool.get_data_page(2 * PAGE), pool.get_data_page(67 * PAGE)
        assert not any(bool(it.any()) for it in outside), "pages that nobody asked for were written"
        made.close()


def test_a_whole_batch_is_one_step_and_goes_to_other_places(directory: Path) -> None:
    pool, keys = host_pool(), names(STORAGE_BATCH_SIZE)
    made = backend(pool, {**two_tiers(directory), "queue": {"memory": "128 MiB"}})
    kept = fill(pool)
    assert all(made.batch_set_v1(keys, places(0, 128))) and made._engine.flush(30)
    pool.kv_buffer.zero_()
    # Scattered places in another order.
    order = torch.randperm(128, generator=torch.Generator().manual_seed(7)) + 100
    indices = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in order.tolist()])
    steps = made.get_stats().kvbraid["steps"]
    assert all(made.batch_get_v1(keys, indices))
    for n, page in enumerate(order.tolist()):
        moved = pool.get_data_page(page * PAGE).view(torch.uint8)
        held, pool.kv_buffer = pool.kv_buffer, kept.view(pool.dtype)
        assert torch.equal(moved, pool.get_data_page(n * PAGE).view(torch.uint8)), n
        pool.kv_buffer = held
    stats = made.get_stats().kvbraid
    assert (stats["steps"], stats["misses"]) == (steps + 1, 0), (stats["steps"] - steps, stats["miss_reasons"])
    made.close()


def test_both_interfaces_read_what_the_other_wrote(directory: Path) -> None:
    for layout in ("layer_first", "page_first"):
        pool, keys = host_pool(layout), names(8)
        made = backend(pool, two_tiers(directory / layout))
        kept = fill(pool)
        flat = [pool.get_data_page(n * PAGE).clone() for n in range(8)]
        assert made.batch_set_v1(keys[:4], places(0, 4)) == [True] * 4
        assert made.batch_set(keys[4:], flat[4:]) and made.set("one", flat[0])
        found = made.batch_get(keys[:4], [pool.get_dummy_flat_data_page() for _ in range(4)])
        assert [content(it) for it in found] == [content(it) for it in flat[:4]], layout
        pool.kv_buffer.zero_()
        assert made.batch_get_v1(keys[4:], places(4, 4)) == [True] * 4 and same(pool, kept, 4, 4), layout
        assert content(made.get("one")) == content(flat[0]) and made.exists("one")
        assert made.get("two") is None and not made.exists("two")
        assert made.batch_get(["one", "two"])[1] is None
        made.close()


def test_pools_that_tell_no_addresses_are_copied(directory: Path) -> None:
    pool, told, keys = host_pool("layer_first"), host_pool("layer_first"), names(8)

    def silent(indices: torch.Tensor) -> None:
        raise NotImplementedError("no addresses")

    pool.get_page_buffer_meta = silent
    kept = fill(pool)
    made = backend(pool, two_tiers(directory))
    assert made.batch_set_v1(keys, places(2, 8)) == [True] * 8
    pool.kv_buffer.zero_()
    assert made.batch_get_v1([*keys[:4], "not stored"], places(2, 5)) == [True] * 4 + [False]
    assert same(pool, kept, 2, 4) and not bool(pool.get_data_page(6 * PAGE).any())
    made.close()
    # The same pages, for a pool that tells them.
    made = backend(told, two_tiers(directory))
    assert made.batch_get_v1(keys, places(2, 8)) == [True] * 8 and same(told, kept, 2, 8)
    made.close()


def test_a_damaged_page_is_a_miss_and_leaves_its_place_alone(directory: Path) -> None:
    pool, keys = host_pool(), names(6)
    made = backend(pool, two_tiers(directory))
    fill(pool)
    wanted = [content(pool.get_data_page(n * PAGE)) for n in range(6)]
    assert all(made.batch_set_v1(keys, places(0, 6)))
    made.close()
    for tier, expected in (("fast", True), ("slow", False)):
        for path in (directory / tier / "rank-0").rglob("*"):
            if path.is_file() and path.stat().st_size >= 1 << 20:
                data = path.read_bytes()
                assert wanted[3][1000:1064] in data
                path.write_bytes(data.replace(wanted[3][1000:1064], bytes(64)))
        made = backend(pool, two_tiers(directory))
        pool.kv_buffer.fill_(7)
        hits = made.batch_get_v1(keys, places(0, 6))
        assert hits == [True, True, True, expected, True, True], (tier, hits)
        for n in (0, 1, 2, 4, 5):
            assert content(pool.get_data_page(n * PAGE)) == wanted[n]
        assert expected or bool((pool.get_data_page(3 * PAGE) == 7).all()), "a miss was written"
        made.close()


def test_another_model_dtype_layout_or_rank_is_never_served(directory: Path) -> None:
    pool, keys = host_pool(), names(4)
    # One directory for all, so that only keys keep them apart.
    shared = two_tiers(directory)
    shared["tier"] = [{"name": "all", "kind": "shared", "path": str(directory / "all"), "capacity": "256 MiB"}]
    whole = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2}
    made = backend(pool, shared, **whole)
    fill(pool)
    assert all(made.batch_set_v1(keys, places(0, 4))) and made._engine.flush(30)
    made.close()
    same_again = backend(pool, shared, **whole)
    assert same_again.batch_exists(keys) == 4
    same_again.close()
    others = [
        (pool, {"model_name": "b"}),
        (pool, {"extra": {"weights": "2"}}),
        (pool, {"extra": {"model": "c"}}),
        (pool, {"tp_size": 4}),
        (pool, {"tp_rank": 1}),
        (pool, {"pp_size": 4}),
        (pool, {"pp_rank": 1}),
        (pool, {"attn_cp_size": 4}),
        (pool, {"attn_cp_rank": 1}),
        (pool, {"is_mla_model": True}),
        (host_pool("layer_first"), {}),
        (host_pool(dtype=torch.float16), {}),
    ]
    for other_pool, other in others:
        made = backend(other_pool, shared, **{**whole, **other})
        other_pool.kv_buffer.zero_()
        assert made.batch_exists(keys) == 0 and made.batch_get_v1(keys, places(0, 4)) == [False] * 4, other
        assert not bool(other_pool.kv_buffer.any()), other
        made.close()


def test_two_ranks_have_an_engine_each_and_half_of_everything(directory: Path) -> None:
    pools = [host_pool(), host_pool()]
    whole = two_tiers(directory)
    whole["tier"][0]["window"] = 6
    made = [backend(pool, whole, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    kept = [fill(pool, seed) for seed, pool in enumerate(pools)]
    keys = names(32)
    for it in made:
        assert all(it.batch_set_v1(keys, places(0, 32))) and it._engine.flush(30)
    assert {it.name for it in (directory / "fast").iterdir()} == {"rank-0", "rank-1"}
    threads, wrong = [], []

    def read(rank: int) -> None:
        for _ in range(5):
            pools[rank].kv_buffer.zero_()
            if made[rank].batch_get_v1(keys, places(0, 32)) != [True] * 32 or not same(pools[rank], kept[rank], 0, 32):
                wrong.append(rank)

    for rank in range(2):
        threads.append(threading.Thread(target=read, args=(rank,)))
        threads[-1].start()
    for it in threads:
        it.join(60)
    assert not wrong and not any(it.is_alive() for it in threads), wrong
    for rank, it in enumerate(made):
        stats = it.get_stats().kvbraid
        assert (stats["rank"], stats["ranks"]) == (rank, 2)
        assert stats["tiers"][0]["capacity_bytes"] == 128 << 20, stats["tiers"][0]
        assert stats["tiers"][0]["window"] == 3, stats["tiers"][0]
        it.close()


def test_all_ranks_of_an_mla_model_read_what_one_wrote(directory: Path) -> None:
    def pool() -> Any:
        device = MLATokenToKVPool(256, PAGE, torch.bfloat16, 512, 64, LAYERS, "cpu", False)
        places = {"device_capacity_tokens": 256, "start_layer": 0, "end_layer": LAYERS, "target_layer_num": LAYERS}
        with host_memory_budget_scope(1 << 30):
            info = device._mla_buffer_info()
            return MLATokenToKVPoolHost(info, 4, 0, PAGE, "layer_first", pin_memory=False, device="cpu", **places)

    pools = [pool(), pool()]
    ranks = {"is_mla_model": True, "tp_size": 2}
    raises(kvbraid.ConfigError, "kind = \"shared\"", backend, pools[0], two_tiers(directory), **ranks)
    shared = two_tiers(directory)
    shared["tier"].append({"name": "all", "kind": "shared", "path": str(directory / "all"), "capacity": "256 MiB"})
    made = [backend(it, shared, tp_rank=rank, **ranks) for rank, it in enumerate(pools)]
    kept, keys = fill(pools[0]), names(16)
    assert all(made[0].batch_set_v1(keys, places(0, 16))) and made[0]._engine.flush(30)
    pools[1].kv_buffer.zero_()
    assert made[1].batch_exists(keys) == 16
    assert made[1].batch_get_v1(keys, places(0, 16)) == [True] * 16 and same(pools[1], kept, 0, 16)
    for it in made:
        it.close()


def test_pools_beside_the_first_have_their_own_pages(directory: Path) -> None:
    pool, beside, keys = host_pool(), host_pool("layer_first"), names(8)
    made = backend(pool, two_tiers(directory))
    made.register_mem_host_pool_v2(beside, "swa")
    kept, other = fill(pool, 1), fill(beside, 2)
    assert all(made.batch_set_v1(keys, places(0, 8)))
    side = PoolTransfer("swa", host_indices=places(0, 3), keys=keys[2:5], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert made.batch_set_v2([side]) == {"swa": [True] * 3}
    # Windows of three pages end where page 4 does, or are cut at the front.
    found = made.batch_exists_v2(keys, [side])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (5, {"kv": 8, "swa": 5}), found
    every = PoolTransfer("swa", keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert made.batch_exists_v2(keys, [every]).kv_hit_pages == 0
    pool.kv_buffer.zero_(), beside.kv_buffer.zero_()
    both = [PoolTransfer("kv", host_indices=places(0, 8), keys=keys), side]
    assert made.batch_get_v2(both) == {"kv": [True] * 8, "swa": [True] * 3}
    assert same(pool, kept, 0, 8) and same(beside, other, 0, 3)
    unknown = PoolTransfer("mamba", host_indices=places(0, 1), keys=keys[:1])
    assert made.batch_get_v2([unknown]) == {"mamba": [False]}
    made.close()


def test_a_configuration_that_cannot_work_names_field_and_fix(directory: Path) -> None:
    pool, good = host_pool(), two_tiers(directory)
    bad = [
        ("weights is missing", good, {"extra": {"weights": ""}}),
        ("weigths", good, {"extra": {"weigths": "1"}}),
        ("config is missing", "", {}),
        ("kvbraid.toml", str(directory / "kvbraid.toml"), {}),
        ("ranks is 0", good, {"extra": {"ranks": 0}}),
        ("for each of 64 ranks", good, {"extra": {"ranks": 64}}),
        ("chunk_bytes_max", two_tiers(directory, chunk="4 KiB"), {}),
    ]
    for words, configuration, other in bad:
        raises(kvbraid.ConfigError, words, backend, pool, configuration, **other)
    other = config(directory)
    raises(kvbraid.ConfigError, "namespace.layout", backend, pool, other)
    made = backend(pool, good)
    raises(kvbraid.OpenError, "", backend, pool, good)
    made.close()


def test_what_fails_is_a_miss_and_no_exception(directory: Path) -> None:
    pool, keys = host_pool(), names(4)
    made = backend(pool, two_tiers(directory))
    fill(pool)
    assert made.batch_set_v1(keys, places(0, 3)) == [False] * 4, "places for three of four pages"
    assert made.batch_get_v1(keys, None) == [False] * 4
    assert made.batch_set_v1([], places(0, 0)) == [] and made.batch_get_v1([], places(0, 0)) == []
    assert made.batch_exists([]) == 0
    odd = ["", "\0", "\ud800", "k" * 100_000]
    assert made.batch_set_v1(odd, places(0, 4)) == [True] * 4 and made.batch_exists(odd) == 4
    assert made.set(keys[0], "no tensor") is False and made.get(keys[0], "no tensor") is None
    assert made.batch_get_v1(names(4, 100), torch.arange(4 * PAGE) + 10**9) == [False] * 4, "outside of the pool"
    made._engine.close()
    assert made.batch_set_v1(keys, places(0, 4)) == [False] * 4 and made.batch_get_v1(keys, places(0, 4)) == [False] * 4
    assert made.batch_exists(keys) == 0 and made.get_stats().kvbraid == {} and made.clear() is False
    made.close()
    made.close()


def test_a_store_larger_than_staging_waits_for_it(directory: Path) -> None:
    pool, keys = host_pool(), names(200)
    made = backend(pool, two_tiers(directory, staging="2 MiB"))
    kept = fill(pool)
    assert all(made.batch_set_v1(keys, places(0, 200)))
    pool.kv_buffer.zero_()
    assert all(made.batch_get_v1(keys, places(0, 200))) and same(pool, kept, 0, 200)
    made.close()


def test_clear_removes_the_model_and_figures_are_told_once(directory: Path) -> None:
    pool, keys = host_pool(), names(8)
    made = backend(pool, two_tiers(directory))
    fill(pool)
    assert all(made.batch_set_v1(keys, places(0, 8))) and all(made.batch_get_v1(keys, places(0, 8)))
    stats = made.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [8]) and stats.prefetch_bandwidth[0] > 0
    assert made.get_stats().prefetch_pgs == []
    assert made._engine.flush(30) and made.clear() is True
    assert made.batch_exists(keys) == 0 and made.batch_get_v1(keys, places(0, 8)) == [False] * 8
    made.close()


def test_the_quick_start_of_the_readme_runs(directory: Path) -> None:
    readme = Path(os.environ["KVBRAID_README"]).read_text()
    section = readme[readme.index("## SGLang") :]
    command = re.search(r"--hicache-storage-backend-extra-config '(\{.*?\})'", section, re.DOTALL)
    toml = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert command and toml, "the README has no command or no configuration"
    extra, text = json.loads(command[1]), toml[1]
    assert extra["config"] == "/etc/kvbraid.toml"
    # Its directories, sizes and ranks are those of a GPU node.
    text = text.replace("/mnt/", f"{directory}/").replace("/run/", f"{directory}/")
    text = re.sub(r'= "\d+ (GiB|TiB)"', '= "64 MiB"', text)
    tomllib.loads(text)
    path = directory / "kvbraid.toml"
    path.write_text(text)
    pool, keys = host_pool(), names(200)
    kept = fill(pool)
    for life in range(2):
        start = replace(storage_config(""), extra_config={**extra, "config": str(path)})
        made = StorageBackendFactory.create_backend("dynamic", start, pool)
        made.register_mem_pool_host(pool)
        if life == 0:
            assert all(made.batch_set_v1(keys, places(0, 200))) and made._engine.flush(30)
        pool.kv_buffer.zero_()
        assert made.batch_exists(keys) == 200
        assert all(made.batch_get_v1(keys, places(0, 200))) and same(pool, kept, 0, 200)
        # After a restart the chunks that a local tier has are not looked for in the shared directory.
        assert life == 1 or served_by_both(made, keys, places(0, 200))
        made.close()


if __name__ == "__main__":
    run(globals())
