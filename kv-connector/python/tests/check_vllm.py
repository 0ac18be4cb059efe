"""A real vLLM over the tier: equal tokens, counted loads, and what may go wrong in between."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import vllm_cpu
import vllm_tier
from harness import run
from tiny_model import make
from vllm_cpu import Said, Vllm, prompts, tiering
from vllm_tier import config, damage

os.environ["PYTHONHASHSEED"] = "0"
HOME = Path(tempfile.mkdtemp(prefix="kvbraid-vllm-"))
MODEL = HOME / "model"
PROMPTS = prompts(lengths=(700, 400, 650, 131, 600, 645))
COUNT = 16


class Shared:
    """What one test leaves to the next: an engine takes some seconds to start."""

    plain: list[list[int]]
    engine: Vllm


def tier(**other: Any) -> dict[str, Any]:
    settings = {"type": "Tier", "module_path": "kvbraid.vllm", "config": configuration(), **other}
    return tiering(settings, primary=64 << 20)


def configuration() -> dict[str, Any]:
    return config(HOME, write_max_age_ms=20)


def hits(engine: Vllm) -> list[int]:
    """Chunks that each storage tier delivered."""
    return [it["hits"] for it in engine.stats()["tiers"]]


def reused(said: list[Said]) -> bool:
    """Whether every prompt was taken from a cache as far as that goes."""
    found, whole = [it.cached for it in said], [whole_blocks(it) for it in PROMPTS]
    assert found == whole, f"{found} tokens were reused of {whole}"
    return True


def whole_blocks(prompt: list[int]) -> int:
    """The last token is always computed."""
    return (len(prompt) - 1) // vllm_cpu.BLOCK * vllm_cpu.BLOCK


def test_tokens_are_those_of_a_vllm_without_it() -> None:
    make(MODEL)
    plain = Vllm(MODEL, None)
    Shared.plain = [it.tokens for it in plain.say(PROMPTS, COUNT)]
    plain.close()
    assert len({tuple(it) for it in Shared.plain}) == len(PROMPTS), "the prompts say the same: nothing would show"
    engine = Shared.engine = Vllm(MODEL, tier())
    assert [it.tokens for it in engine.say(PROMPTS, COUNT)] == Shared.plain
    assert hits(engine) == [0, 0]


def test_a_step_is_loaded_at_once_from_both_tiers_and_gives_the_same_tokens() -> None:
    engine = Shared.engine
    engine.written()
    engine.forget()
    before = engine.stats()
    said = engine.say(PROMPTS, COUNT)
    assert [it.tokens for it in said] == Shared.plain
    assert reused(said)
    stats = engine.stats()
    assert stats["steps"] - before["steps"] == 1, "all requests arrived in one step"
    assert stats["hits_staged"] == stats["hits_host_cache"] == 0
    assert all(count > 0 for count in hits(engine)), hits(engine)
    unique = {tuple(it[: end + 32]) for it in PROMPTS for end in range(0, whole_blocks(it), 32)}
    assert sum(hits(engine)) == stats["hits"] >= len(unique), (stats["hits"], len(unique))


def test_vllms_own_primary_tier_is_asked_first() -> None:
    engine = Shared.engine
    before = sum(hits(engine))
    assert engine.llm.reset_prefix_cache()
    assert [it.tokens for it in engine.say(PROMPTS, COUNT)] == Shared.plain
    assert sum(hits(engine)) == before


def test_a_restarted_engine_finds_what_the_last_one_stored() -> None:
    Shared.engine.close()
    engine = Shared.engine = Vllm(MODEL, tier())
    said = engine.say(PROMPTS, COUNT)
    assert [it.tokens for it in said] == Shared.plain
    assert reused(said)
    assert all(count > 0 for count in hits(engine)), hits(engine)


def test_a_tier_that_goes_away_in_the_middle_of_a_step_costs_no_token() -> None:
    engine = Shared.engine
    engine.forget()
    before = hits(engine)
    inner = engine.tier.on_schedule_end
    taken = []

    def end_step(context: object) -> None:
        if engine.tier._loads._collected and not taken:
            # The device stops in the step, and the directory is gone.
            taken.extend((HOME / "slow").rglob("*"))
            for path in taken:
                if path.is_file() and path.stat().st_size > 1 << 20:
                    os.truncate(path, 0)
            (HOME / "slow").rename(HOME / "away")
        inner(context)

    engine.tier.on_schedule_end = end_step
    said = engine.say(PROMPTS, COUNT)
    del engine.tier.on_schedule_end
    assert taken and [it.tokens for it in said] == Shared.plain
    assert reused(said)
    after = hits(engine)
    assert after[0] > before[0] and after[1] == before[1], (before, after)


def test_damage_on_both_tiers_is_found_counted_and_computed_again() -> None:
    # The lost tier comes back empty, and is filled by the first that computes.
    Shared.engine.close()
    for name in ("away", "slow", "fast"):
        shutil.rmtree(HOME / name, ignore_errors=True)
    engine = Shared.engine = Vllm(MODEL, tier())
    assert [it.tokens for it in engine.say(PROMPTS, COUNT)] == Shared.plain
    engine.written()
    engine.forget()
    assert damage(HOME / "fast") and damage(HOME / "slow")
    said = engine.say(PROMPTS, COUNT)
    assert [it.tokens for it in said] == Shared.plain
    stats = engine.stats()
    bad = [it["corrupt_reads"] + it["lost_chunks"] for it in stats["tiers"]]
    assert all(count > 0 for count in bad) and stats["misses"] > 0, (bad, stats["misses"])
    # The last prompt begins like the first, which was computed by then.
    assert all(it.cached == 0 for it in said[:-1]), [it.cached for it in said]
    # What was computed again is stored again.
    engine.written()
    engine.forget()
    said = engine.say(PROMPTS, COUNT)
    assert [it.tokens for it in said] == Shared.plain and all(it.cached > 0 for it in said)
    engine.close()


def test_other_weights_another_dtype_or_hash_seed_are_never_served() -> None:
    other = make(HOME / "other" / "model", seed=1)
    for name, model, settings, seed in (
        ("weights", other, {}, "0"),
        ("dtype", MODEL, {"dtype": "float32"}, "0"),
        ("hash seed", MODEL, {}, "1"),
    ):
        os.environ["PYTHONHASHSEED"] = seed
        # The name of the model is the same: only its files tell.
        namespace = {"model": str(MODEL)}
        big = configuration()
        big["engine"]["chunk_bytes_max"] = "128 KiB"
        engine = Vllm(model, tier(namespace=namespace, config=big), **settings)
        said = engine.say(PROMPTS[:2], COUNT)
        stats = engine.stats()
        assert stats["lookup_chunks"] > 0 and stats["lookup_hits"] == stats["wanted"] == 0, name
        assert all(it.cached == 0 for it in said), name
        engine.close()
    os.environ["PYTHONHASHSEED"] = "0"
    engine = Vllm(MODEL, tier())
    said = engine.say(PROMPTS[:2], COUNT)
    assert [it.tokens for it in said] == Shared.plain[:2] and all(it.cached > 0 for it in said)
    engine.close()


if __name__ == "__main__":
    try:
        run({**vars(vllm_tier), **globals()})
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
