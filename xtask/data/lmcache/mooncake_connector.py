"""LMCache's remote connector for Mooncake, inside a serving engine: its adapter for the server is in no wheel."""

from __future__ import annotations

import time
from typing import Any

from managers import WAIT_S, InProcess, Shape
from mooncake_master import RETRY_S, Mooncake


class MooncakeConnector(InProcess):
    """Objects leave Mooncake's memory for the device before anything is measured."""

    def __init__(self, shape: Shape, path: str) -> None:
        self._mooncake = Mooncake(path)
        extra: dict[str, Any] = {f"mooncake_{key}": value for key, value in self._mooncake.client.items()}
        extra |= {"mooncake_local_buffer_size": str(64 << 20), "transfer_timeout": WAIT_S}
        # Without LMCache's header an object is read straight into its memory.
        extra["save_chunk_meta"] = False
        options = {"remote_url": "mooncakestore://", "blocking_timeout_secs": int(WAIT_S), "extra_config": extra}
        super().__init__(shape, "RemoteBackend", options, is_async=False)

    def store(self) -> None:
        for request in self._requests:
            self._store_patiently(request)
        names = [key.to_string() for request in self._requests for key in request]
        self._mooncake.flush(self._backend.connection.getWrappedConnector().store, names)
        self._backend.close()
        self._backend.connection = None
        self._mooncake.restart()
        self._backend.init_connection()
        assert self._backend.connection is not None, "LMCache does not connect again"
        # Mooncake's memory for what is read is faulted in by the first who reads.
        self.read()
        self.check()

    def _store_patiently(self, request: dict[Any, int]) -> None:
        """Mooncake refuses objects until its memory has room, and LMCache says nothing of it."""
        missing, end = request, time.monotonic() + WAIT_S
        while missing:
            if time.monotonic() > end:
                raise TimeoutError("stores are refused")
            self._put(missing)
            again = time.monotonic() + RETRY_S
            while missing and time.monotonic() < again:
                time.sleep(0.02)
                missing = {key: number for key, number in missing.items() if not self._backend.contains(key)}

    def close(self) -> None:
        super().close()
        self._mooncake.close()
