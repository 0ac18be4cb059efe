"""A real vLLM on the processor, in this process: made, asked and thrown away."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
}
os.environ.update(ENVIRONMENT)

BLOCK = 32
"""Tokens of a block, the fewest that the processor's attention takes."""
PRIMARY = 16 << 20


@dataclass
class Said:
    """What came of one prompt."""

    tokens: list[int]
    cached: int


def tiering(*tiers: dict[str, Any], primary: int = PRIMARY) -> dict[str, Any]:
    """vLLM's own offloading connector with these secondary tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "cpu_offload",
            "cpu_bytes_to_use": primary,
            "secondary_tiers": list(tiers),
        },
    }


class Vllm:
    """One engine."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, **other: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **other,
        }
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm: Any = LLM(str(model), **settings)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def tier(self) -> Any:
        """Our secondary tier, the only one."""
        (tier,) = self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers
        return tier

    def stats(self) -> dict[str, Any]:
        return self.tier._engine.stats()

    def say(self, prompts: list[list[int]], count: int = 16) -> list[Said]:
        from vllm import SamplingParams

        ask = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        answers = self.llm.generate([{"prompt_token_ids": it} for it in prompts], ask, use_tqdm=False)
        said = [Said(list(it.outputs[0].token_ids), it.num_cached_tokens or 0) for it in answers]
        assert all(len(it.tokens) == count for it in said), "a request ended early"
        return said

    def forget(self) -> None:
        """Empties the device's and the primary tier's memory: what is found then comes from our tiers."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def written(self) -> None:
        """Returns when all that was computed is in our tiers' files."""
        # Stores of a step are sent with the next one.
        for _ in range(5):
            self.llm.llm_engine.step()
        self.tier.drain_jobs()
        assert self.tier._engine.flush(30.0)

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        # Not its core: the client does that only once.
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def prompts(seed: int = 7, lengths: tuple[int, ...] = (260, 131, 250)) -> list[list[int]]:
    """Token ids; the last prompt shares most of the first."""
    source = random.Random(seed)
    made = [[source.randrange(3, 512) for _ in range(length)] for length in lengths]
    shared = min(lengths[0], lengths[-1]) * 3 // 4
    made[-1][:shared] = made[0][:shared]
    return made
