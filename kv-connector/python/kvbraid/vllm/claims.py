"""vLLM's offloading connector, which also says when waiting requests will read their chunks.

    --kv-transfer-config '{"kv_connector": "ClaimingConnector", "kv_connector_module_path": "kvbraid.vllm.claims", ...}'

with everything else as for `OffloadingConnector`, a secondary tier `kvbraid.vllm` and, in its configuration, a tier of kind
flash. A claim is recorded when a request arrives. After every scheduling iteration the engine is told what runs and waits, from
which it projects when claims are used. A claim is given up when its request runs or ends. Requests are neither looked up, ordered nor loaded in another way than without.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.request import RequestStatus

from kvbraid import Key
from kvbraid.vllm.tier import Tier
from kvbraid.vllm.timeline import Timeline

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.kvbraid")

IDLE_S = 0.005
"""Between two looks at the queue while nothing runs."""


class ClaimingConnector(OffloadingConnector):
    """As the offloading connector; claims are beside its way."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.claims: Claims | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.claims = Claims.over(self.connector_scheduler, vllm_config)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self._tell("arrived", request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        self._tell("stepped", scheduler_output)
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._tell("ended", request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tell("ended", request)
        return super().request_finished_all_groups(request, block_ids)

    def _tell(self, what: str, about: Any) -> None:
        """Claims only save time: what fails in them costs the claims and nothing else."""
        if self.claims is None:
            return
        try:
            getattr(self.claims, what)(about)
        except Exception:
            _log.exception("KVBraid: claims are given up, requests go on without")
            claims, self.claims = self.claims, None
            claims.give_up()


class Claims:
    """What the scheduler's requests claim."""

    def __init__(self, tier: Tier, scheduler: Any, vllm_config: VllmConfig) -> None:
        config = vllm_config.scheduler_config
        self._tier = tier
        self._groups = scheduler.config.kv_group_configs
        self._primary = scheduler.manager.primary_tier
        above = vllm_config.kv_transfer_config.kv_connector_extra_config.get("cpu_bytes_to_use", 0)
        self._chunks_above = int(above) // tier.block_size_bytes
        self._slots = config.max_num_seqs
        self._timeline = Timeline()
        self._by_priority = config.policy == "priority"
        self._waiting: dict[str, tuple[Request, int]] = {}
        """In order of arrival, with the chunks claimed."""
        self._running: dict[str, Request] = {}
        self._stepped_at: tuple[float, int, int] | None = None
        self._told_at = 0.0
        self._is_told = False
        """Since the last step."""

    @classmethod
    def over(cls, scheduler: Any, vllm_config: VllmConfig) -> Claims | None:
        """None where there is nothing that could be claimed."""
        tiers = getattr(scheduler.manager, "secondary_tiers", [])
        tier = next((it for it in tiers if isinstance(it, Tier)), None)
        if tier is None or not any(it.get("claims") for it in tier.engine.stats()["tiers"]):
            _log.warning("KVBraid: no secondary tier with a tier of kind flash, nothing is claimed")
            return None
        return cls(tier, scheduler, vllm_config)

    def arrived(self, request: Request) -> None:
        """Records what it will read from below vLLM's own memory."""
        name = request.request_id
        keys = self._keys(request)
        self._waiting[name] = (request, len(keys))
        # Before the first schedule a claim would count as used at once; after it, what it does not name waits for the next.
        if keys and not self._is_told:
            self._tell()
        claimed = self._tier.engine.claim(name, keys) if keys else 0
        self._waiting[name] = (request, claimed)

    def _keys(self, request: Request) -> list[Key]:
        """Of each group the chunks from its beginning that can be loaded. The last token is always computed."""
        context = ReqContext(req_id=request.request_id)
        found: list[Key] = []
        for group in self._groups:
            count = (request.num_tokens - 1) // group.tokens_per_chunk
            size = group.hashes_per_chunk
            hashes = islice(request.block_hashes, size - 1, size * count, size)
            names = [make_offload_key(it, group.group_idx) for it in hashes]
            below = [it for it in names if self._primary.lookup(it, context) is LookupResult.MISS]
            keys = self._tier.chunks.keys(below)
            held = self._tier.engine.contains(keys)
            found += [key for key, _ in takewhile(lambda it: it[1], zip(keys, held, strict=True))]
        return found

    def stepped(self, output: SchedulerOutput) -> None:
        """What the scheduler has decided for one step."""
        now = time.monotonic()
        self._is_told = False
        if self._stepped_at is not None:
            begun, tokens, requests = self._stepped_at
            if tokens > 0:
                self._timeline.stepped(now - begun, tokens, requests)
        self._stepped_at = (now, output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        for request_id in output.preempted_req_ids or ():
            # Its chunks were read before.
            if request_id in self._running:
                self._waiting[request_id] = (self._running.pop(request_id), 0)
        for request_id in output.num_scheduled_tokens:
            if request_id in self._waiting:
                self._running[request_id] = self._waiting.pop(request_id)[0]
                self._tier.engine.cancel(request_id)
        # Without work vLLM steps as fast as it can, until something was loaded.
        is_idle = output.total_num_scheduled_tokens == 0 and now < self._told_at + IDLE_S
        if not is_idle and any(claimed for _, claimed in self._waiting.values()):
            self._told_at = now
            self._tell()

    def _tell(self) -> None:
        """The state of the scheduler, for the engine to project from."""
        waiting = list(self._waiting.values())
        if self._by_priority:
            waiting.sort(key=lambda it: (it[0].priority, it[0].arrival_time))
        # vLLM looks all of them up as soon as it could run one more, and begins to read as much as there is memory for; what
        # finds none waits for its turn.
        chunks = accumulate(claimed for _, claimed in waiting)
        read_ahead = sum(1 for _ in takewhile(lambda it: it <= self._chunks_above, chunks))
        self._tier.engine.schedule(
            [self._work(it, 0) for it in self._running.values()],
            [self._work(*it) for it in waiting],
            slots=self._slots,
            iteration_s=self._timeline.step_s,
            prompt_token_s=self._timeline.token_s,
            read_ahead=read_ahead,
            ended=self._timeline.ended,
        )
        self._timeline.ended = []
        self._is_told = True

    def _work(self, request: Request, chunks: int) -> tuple[str, int, int, int]:
        cached = chunks // len(self._groups) * self._groups[0].tokens_per_chunk
        computed = max(request.num_computed_tokens, cached)
        # The token written last is computed by the next step: that is decoding, not a prompt.
        left = max(0, request.num_tokens - computed)
        prompt = left if computed < request.num_prompt_tokens else 0
        return request.request_id, prompt, request.num_output_tokens, request.max_tokens

    def ended(self, request: Request) -> None:
        """Finished, or aborted in whatever state."""
        name = request.request_id
        if not self._tier.engine.closed:
            self._tier.engine.cancel(name)
        self._waiting.pop(name, None)
        if self._running.pop(name, None) and request.status != RequestStatus.FINISHED_ABORTED:
            self._timeline.finished(request.num_output_tokens)

    def give_up(self) -> None:
        """Nothing is claimed any more."""
        engine = self._tier.engine
        if not engine.closed:
            for name in self._waiting:
                engine.cancel(name)
