"""KVBraid: reusable KV cache on every storage tier of a node, read back at the sum of their bandwidths.

>>> from kvbraid import Engine, KeySpace
>>> with Engine("kvbraid.toml") as engine:                     # doctest: +SKIP
...     keys = [KeySpace(engine.namespace).key(chunk_hash)]
...     engine.store(keys, [payload])
...     load = engine.submit_load(keys, [bytearray(len(payload))])
...     while (hits := load.take()) is None:
...         load.wait(1.0)

Adapters: `kvbraid.lmcache`, `kvbraid.sglang`, `kvbraid.vllm`.
"""

import atexit

from kvbraid._native import (
    ClosedError,
    ConfigError,
    Engine,
    Error,
    Fill,
    ForkedError,
    InternalError,
    Key,
    KeyError,
    KeySpace,
    Load,
    OpenError,
    Page,
    Region,
    Seek,
    SizeError,
    Stage,
    _at_exit,
)

# Engines that somebody still holds are closed, and what waits in them returns: Python ends threads where they are.
atexit.register(_at_exit)

__all__ = [
    "ClosedError",
    "ConfigError",
    "Engine",
    "Error",
    "Fill",
    "ForkedError",
    "InternalError",
    "Key",
    "KeyError",
    "KeySpace",
    "Load",
    "OpenError",
    "Page",
    "Region",
    "Seek",
    "SizeError",
    "Stage",
]
