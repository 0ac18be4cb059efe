"""vLLM's half: LMCache's connector, with `"kv_connector_module_path": "kvbraid.lmcache_steps.connector"`.

All marks are of the scheduler: there is one for each engine, and it alone knows when a pass has *run*. Workers' hooks
around the model (`start_load_kv`, `wait_for_save`) stand around the launch of its kernels, which on a GPU is over long
before they are; and there is a worker for each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm import lmcache_mp_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvbraid.lmcache_steps.teller import Marks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.kvbraid")


class LMCacheMPConnector(lmcache_mp_connector.LMCacheMPConnector):
    """As LMCache's, of the same name; marks are beside its way."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.marks: Marks | None = Marks(self.scheduler_adapter) if role == KVConnectorRole.SCHEDULER else None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._tell("asked", request, found[0])
        return found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        self._tell("scheduled", scheduler_output.total_num_scheduled_tokens > 0)
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._tell("ended", request)
        return super().request_finished(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        # vLLM calls it once for each step that was scheduled, in their order, when its output is there.
        self._tell("ran")
        return super().take_events()

    def shutdown(self) -> None:
        self._tell("leave")
        super().shutdown()

    def _tell(self, what: str, *about: Any) -> None:
        """Marks only save time: what fails in them costs the marks and nothing else."""
        if self.marks is None:
            return
        try:
            getattr(self.marks, what)(*about)
        except Exception:
            _log.exception("KVBraid: no more marks are sent, everything goes on without")
            self.marks = None
