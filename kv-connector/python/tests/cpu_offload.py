"""vLLM's own KV offloading with a processor in the place of the GPU, which vLLM itself refuses.

`"spec_name": "CPUTieringSpec", "spec_module_path": "cpu_offload"`: all of vLLM's tiering is its own, only the copies
between the device's blocks and host memory are made here.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class CopyingWorker(OffloadingWorker):
    """Copies at once, when a job is submitted."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        self._pairs = []
        for cache in caches.tensors:
            page = cache.page_size_bytes
            device = cache.tensor.view(torch.int8).view(-1, page)
            self._pairs.append((device, region.create_next_worker_view(page * blocks_per_chunk), page))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_host: bool) -> bool:
        begun = time.perf_counter()
        size = 0
        for block, chunk, part in self._places(blocks, chunks):
            for device, host, page in self._pairs:
                there, here = device[block], host[chunk, part * page : (part + 1) * page]
                here.copy_(there) if to_host else there.copy_(here)
                size += page
        took = max(1e-9, time.perf_counter() - begun)
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=took))
        return True

    def _places(self, blocks: Any, chunks: Any) -> Any:
        """Of each block: itself, its chunk, and which part of that it is. A group's first chunk may begin within."""
        block_at = chunk_at = 0
        for count, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            if count == 0:
                continue
            skipped = first % self._blocks_per_chunk
            for n in range(count):
                chunk, part = divmod(skipped + n, self._blocks_per_chunk)
                yield int(blocks.block_ids[block_at + n]), int(chunks.block_ids[chunk_at + chunk]), part
            block_at += count
            chunk_at += -(-(skipped + count) // self._blocks_per_chunk)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CPUTieringSpec(TieringOffloadingSpec):
    """Its scheduler side is vLLM's."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
