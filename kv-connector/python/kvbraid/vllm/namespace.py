"""What decides a chunk's bytes besides its tokens, as this vLLM is set up.

What cannot be found out makes the namespace one of this process alone: then nothing is shared, and nothing wrong served.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import uuid
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform

from kvbraid import ConfigError
from kvbraid.vllm.weights import identity

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

_log = logging.getLogger("vllm.kvbraid")

FIELDS = (
    "model weights dtype layout chunk_tokens serde hash_algorithm hash_seed tensor_parallel pipeline_parallel "
    "context_parallel engine engine_major extra"
).split()
_UNSEEDED = ("sha256", "sha256_cbor")
"""Hashes that begin with the same constant everywhere while PYTHONHASHSEED is not set."""
_PICKLED = ("sha256", "xxhash")
"""Hashes of pickled objects: another Python may pickle otherwise."""


def of_engine(spec: OffloadingSpec, chunk_bytes: int, given: dict[str, Any], persistent: bool) -> dict[str, Any]:
    """The namespace. `given` replaces what is found, and adds to `extra`."""
    wrong = sorted(set(given) - set(FIELDS))
    if wrong:
        raise ConfigError(f"namespace: {', '.join(wrong)}: no such field; there are {', '.join(FIELDS)}")
    whole = _whole_config()
    found = _from_spec(spec, chunk_bytes)
    if whole is not None:
        _from_config(found, whole, spec, persistent)
    extra = {**found["extra"], **given.get("extra", {})}
    namespace = {**found, **given, "extra": extra}
    unknown = sorted(name for name, value in {**namespace, **extra}.items() if value is None)
    if unknown:
        # A person who says it knows it.
        _log.warning(
            "KVBraid: %s cannot be found out: what is stored serves this process only. Write it into `namespace` "
            "of the secondary tier to share chunks and keep them over restarts.",
            ", ".join(unknown),
        )
        extra["process"] = uuid.uuid4().hex
        namespace = {name: "unknown" if value is None else value for name, value in namespace.items()}
        namespace["extra"] = {name: value for name, value in extra.items() if value is not None}
    return namespace


def _from_spec(spec: OffloadingSpec, chunk_bytes: int) -> dict[str, Any]:
    config, parallel = spec.config, spec.config.parallel
    groups = [(it.group_id, it.tokens_per_block, it.layer_names) for it in config.groups]
    release = vllm.__version__.split(".")
    return {
        "model": config.model.name,
        "weights": None,
        "dtype": config.model.dtype,
        "layout": None,
        "chunk_tokens": config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
        "serde": "raw",
        "hash_algorithm": None,
        "hash_seed": None,
        "tensor_parallel": parallel.tp_size,
        "pipeline_parallel": parallel.pp_size,
        "context_parallel": parallel.pcp_size * parallel.dcp_size,
        "engine": "vllm",
        "engine_major": int(release[0]) if release[0].isdecimal() else 0,
        "extra": {
            "surface": "offloading",
            # Before 1.0 any of these may change what is stored.
            "release": ".".join(release[:2]),
            "chunk_bytes": str(chunk_bytes),
            "groups": _digest(groups),
            "tokens_per_hash": str(config.cache.tokens_per_hash),
            "world": f"{parallel.world_size} of {parallel.pcp_size}x{parallel.dcp_size}",
            "shape": f"replicated={config.replicated_layout} canonical={config.canonical_layout}",
        },
    }


def _from_config(found: dict[str, Any], whole: VllmConfig, spec: OffloadingSpec, persistent: bool) -> None:
    model, cache = whole.model_config, whole.cache_config
    found["weights"] = identity(whole)
    packing = _packing(whole)
    found["layout"] = None if packing is None else f"{spec.config.kv_cache_layout}/{packing}"
    algorithm = str(cache.prefix_caching_hash_algo)
    found["hash_seed"] = _hash_seed(algorithm, persistent)
    python = f"/python{sys.version_info.major}.{sys.version_info.minor}" if algorithm in _PICKLED else ""
    found["hash_algorithm"] = algorithm + python
    extra = found["extra"]
    extra["model_dtype"] = str(model.dtype)
    # Where it was read from, and by which library, decides nothing.
    own = {name: it for name, it in model.hf_config.to_dict().items() if name[0] != "_" and name != "transformers_version"}
    extra["model_config"] = _digest(own)
    extra["quantization"] = str(model.quantization)
    extra["runner"] = f"v2={getattr(whole, 'use_v2_model_runner', None)}"
    extra["attention"] = str(whole.attention_config.backend)
    speculative = whole.speculative_config
    if speculative is not None:
        draft = speculative.draft_model_config
        extra["draft"] = f"{speculative.method} {draft and (draft.model, draft.revision)}"
    if whole.lora_config is not None:
        # The hash has an adapter's name, not its weights.
        extra["lora"] = None
    if getattr(cache, "calculate_kv_scales", False):
        extra["kv_scales"] = None


def _hash_seed(algorithm: str, persistent: bool) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}"
    if algorithm in _UNSEEDED:
        return "none"
    if persistent:
        raise ConfigError(
            f"PYTHONHASHSEED: is not set, so {algorithm} hashes differ from process to process, and these tiers outlive "
            "one; set PYTHONHASHSEED=0 for every vLLM, or start it with --prefix-caching-hash-algo sha256_cbor"
        )
    return f"process {uuid.uuid4().hex}"


def _packing(whole: VllmConfig) -> str | None:
    """How the processor's kernels arrange what is in a block. None if that is not known."""
    if not current_platform.is_cpu():
        return f"{current_platform.device_type} {current_platform.get_device_capability()}"
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        model, cache = whole.model_config, whole.cache_config
        isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
        return f"cpu {current_platform.get_cpu_architecture().name} {isa}"
    except Exception as error:
        _log.warning("KVBraid: the packing of this CPU is not known: %s", error)
        return None


def _whole_config() -> VllmConfig | None:
    """vLLM's configuration. A secondary tier is given an extract without weights and hash; its callers have the whole."""
    found = get_current_vllm_config_or_none()
    frame = sys._getframe()
    while found is None and frame is not None:
        local = frame.f_locals.get("vllm_config")
        found = local if isinstance(local, VllmConfig) else None
        frame = frame.f_back
    return found


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
