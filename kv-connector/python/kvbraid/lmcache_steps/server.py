"""The server's half: `lmcache server --server-module '{"module_path": "kvbraid.lmcache_steps.server"}'`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext, server_module_handler

from kvbraid import ConfigError
from kvbraid.lmcache import L2Adapter
from kvbraid.lmcache_steps.mark import METHOD, TAKEN, Mark

# LMCache shows the records of its own loggers only.
_log = logging.getLogger("lmcache.kvbraid")


class MarksModule:
    """Hands marks to every L2 adapter of ours that the server has."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._taken = self._refused = 0

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            return {"kvbraid_marks": {"taken": self._taken, "refused": self._refused}}

    def close(self) -> None:
        """Nothing is held here."""

    def register_zmq_services(self, server: Any) -> None:
        """A thread for marks (and other modules' calls): behind look-ups, which hash all tokens, they would come too late."""
        server.add_normal_thread_pool(["server_module_call"], max_workers=1)

    @server_module_handler(METHOD)
    def mark(self, payload: bytes) -> bytes:
        """Answers `TAKEN`, or why not. Raises nothing: LMCache would log each time."""
        try:
            mark = Mark.decode(payload)
            taken = [it.steps.mark(mark) for it in self._adapters()]
            refused = "" if all(taken) else "too many senders"
            refused = refused if taken else "the server has no L2 adapter of kvbraid"
        except ValueError as error:
            refused = str(error)
        with self._lock:
            self._taken += not refused
            self._refused += bool(refused)
        return refused.encode() if refused else TAKEN

    def _adapters(self) -> Iterator[L2Adapter]:
        """Adapters come and go while the server runs."""
        for _, adapter in self._context.storage_manager.l2_adapters():
            # That of a "serde" is around ours.
            found = getattr(adapter, "inner_adapter", adapter)
            if isinstance(found, L2Adapter):
                yield found


def build_server_modules(context: ExtServerModuleBuildContext) -> MarksModule:
    """What `--server-module` calls. It has no settings."""
    if context.config:
        raise ConfigError(f"--server-module: config: {', '.join(sorted(context.config))}: there is nothing to be set")
    module = MarksModule(context.server_context)
    if not list(module._adapters()):
        _log.warning("KVBraid: the server has no L2 adapter of kvbraid: marks are of no use")
    return module
