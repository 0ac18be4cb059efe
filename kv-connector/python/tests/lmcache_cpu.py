"""LMCache's connector, and ours over it, for a vLLM on the processor.

Without Triton, vLLM asks every module's globals for kernels by `vars(...)`; a global of llvmlite, which LMCache brings,
answers every attribute and so has no such thing. It is given one.
"""

from llvmlite.binding import ffi

ffi.lib._fntab["__dict__"] = {}

from kvbraid.lmcache_steps.connector import LMCacheMPConnector as MarkingConnector  # noqa: E402
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector  # noqa: E402

__all__ = ["LMCacheMPConnector", "MarkingConnector"]
