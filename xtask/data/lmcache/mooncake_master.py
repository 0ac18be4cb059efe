"""Mooncake's master, in a network that only this process and its children are in, and how its client is set up."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAIT_S = 120.0
LEASE_MS, RETRY_S = 200, 1.0
"""What was asked for does not leave memory while its lease lasts: who asks again sooner finds no room, ever."""
SEGMENT_BYTES = 512 << 20
"""Memory that chunks are put to, and leave when the device has them."""
STAGING_BYTES = 1 << 30
"""Memory that the client reads the device into."""
HOST, PORT = "127.0.0.1", 50051
CLONE_NEWNET, PR_SET_PDEATHSIG, SIOCSIFFLAGS, IFF_UP = 0x40000000, 1, 0x8914, 1


def leave_network() -> None:
    """Mooncake's client listens on all interfaces, whatever it is told: let there be none but a loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a network of its own: unshare: {os.strerror(number)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def end_with_parent() -> None:
    """Whoever kills this process by its id leaves nothing behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Mooncake:
    """A master that runs, and how its client is to be set up to keep objects in this directory."""

    def __init__(self, path: str) -> None:
        leave_network()
        Path(path).mkdir(parents=True)
        os.environ.update(
            MC_FORCE_TCP="1",
            MOONCAKE_OFFLOAD_USE_URING="true",
            MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS="1",
            MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=str(STAGING_BYTES),
            MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS="60000",
            # What is left over when a file takes several objects never reaches the device.
            MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT="1",
            MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION="false",
        )
        # Some callers hand all of it on as text.
        self.client = {
            "local_hostname": HOST,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"{HOST}:{PORT}",
            "protocol": "tcp",
            "global_segment_size": str(SEGMENT_BYTES),
            "enable_ssd_offload": "true",
            "ssd_offload_path": path,
        }
        self._start()

    def _start(self) -> None:
        import mooncake

        program = Path(mooncake.__path__[0]) / "mooncake_master"
        options = [f"--rpc_address={HOST}", f"--rpc_port={PORT}", f"--metrics_host={HOST}", "--enable_offload=true"]
        options += [f"--default_kv_lease_ttl={LEASE_MS}", "--enable_metric_reporting=false", "--logtostderr"]
        self._master = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)
        end = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection((HOST, PORT), timeout=1).close()
                return
            except OSError:
                if self._master.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def flush(self, store: Any, names: list[str]) -> None:
        """Returns when the device holds all of these objects."""
        end = time.monotonic() + WAIT_S
        while not all(self._is_on_device(it) for it in store.batch_get_replica_desc(names).values()):
            if time.monotonic() > end:
                raise TimeoutError("the device does not get all objects")
            time.sleep(0.2)

    def _is_on_device(self, replicas: list[Any]) -> bool:
        return any(it.is_local_disk_replica() for it in replicas)

    def restart(self) -> None:
        """Without what it knew of memory: a client that comes then knows the device's objects only."""
        # Mooncake's client lives as long as its Python object, and would tell the new master of itself.
        gc.collect()
        self.close()
        self._start()

    def close(self) -> None:
        self._master.kill()
        self._master.wait()


if __name__ == "__main__":
    try:
        leave_network()
        import mooncake.store  # noqa: F401
    except (OSError, ImportError) as error:
        sys.exit(str(error))
