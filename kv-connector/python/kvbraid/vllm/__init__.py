"""vLLM: a secondary tier of its own KV offloading, which moves chunks between the GPU and host memory.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000,
        "secondary_tiers": [{"type": "Tier", "module_path": "kvbraid.vllm", "config": "/etc/kvbraid.toml"}]}}'
"""

from kvbraid.vllm.tier import TESTED_VERSION, Tier

__all__ = ["TESTED_VERSION", "Tier"]
