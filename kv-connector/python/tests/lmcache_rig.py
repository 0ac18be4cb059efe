"""The L2 adapter as LMCache's server makes it and its controllers use it."""

from __future__ import annotations

import hashlib
import json
import os
import select
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

SIZE = 300_000


def spec(configuration: object) -> str:
    """What `--l2-adapter` gets."""
    params = {"config": str(configuration) if isinstance(configuration, Path) else configuration}
    return json.dumps(
        {"type": "plugin", "module_path": "kvbraid.lmcache", "class_name": "L2Adapter", "adapter_params": params}
    )


class Memory:
    """As much of a MemoryObj as an adapter may use."""

    def __init__(self, content: bytes | int) -> None:
        self.content = bytearray(content)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.content)

    def get_size(self) -> int:
        return len(self.content)


def object_key(n: int, **other: Any) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    digest = hashlib.blake2b(n.to_bytes(8, "big"), digest_size=32).digest()
    return ObjectKey(**{"chunk_hash": digest, "model_name": "a/model", "kv_rank": 0x01000100, **other})


def payload(n: int) -> bytes:
    return hashlib.shake_128(n.to_bytes(8, "big")).digest(SIZE)


def adapter(configuration: object, **wrapper: Any) -> Any:
    """As the server makes it, perhaps in a wrapper of LMCache's."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    text = spec(configuration)
    if wrapper:
        text = json.dumps({**wrapper, "inner": json.loads(text)})
    configs = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[text]))
    made = create_l2_adapter(configs.adapters[0])
    made.set_backend_identity("plugin")
    return made


def told(fd: int, ask: Any) -> Any:
    """Asks as a controller does: only when the descriptor was told of something."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if poll.poll(1000):
            os.eventfd_read(fd)
            answer = ask()
            # An answer about no keys is false as well.
            if answer is not None and answer != {}:
                return answer
    raise AssertionError("nothing was told")


def store(made: Any, keys: list[Any], contents: list[bytes]) -> bool:
    task = made.submit_store_task(keys, [Memory(it) for it in contents])
    return told(made.get_store_event_fd(), made.pop_completed_store_tasks)[task].is_successful()


def lookup(made: Any, keys: list[Any]) -> list[bool]:
    task = made.submit_lookup_and_lock_task(keys, {})
    bits = told(made.get_lookup_and_lock_event_fd(), lambda: made.query_lookup_and_lock_result(task))
    assert made.query_lookup_and_lock_result(task) is None
    return [bits.test(n) for n in range(len(keys))]


def load(made: Any, keys: list[Any]) -> tuple[list[bool], list[bytes]]:
    objects = [Memory(SIZE) for _ in keys]
    task = made.submit_load_task(keys, objects)
    bits = told(made.get_load_event_fd(), lambda: made.query_load_result(task))
    assert made.query_load_result(task) is None
    return [bits.test(n) for n in range(len(keys))], [bytes(it.content) for it in objects]
