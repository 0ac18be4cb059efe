"""Drives a vLLM by hand: requests are added when they arrive, whether or not earlier ones are done."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from load import Ask

IDLE_S = 0.001
"""vLLM's own serving loop sleeps so long after a step in which no model ran; storage's threads run meanwhile."""


@dataclass
class Outcome:
    """What became of a request; times are seconds after it arrived."""

    arrived: float
    scheduled_s: float | None = None
    """Its loads, if any, were done."""
    first_s: float | None = None
    end_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    reason: str | None = None


class Driver:
    """Of one engine, which nobody else uses."""

    def __init__(self, engine: Any) -> None:
        self._llm = engine.llm.llm_engine
        self._core = engine.core
        self._open: dict[str, Outcome] = {}
        self._number = 0
        self._begun = 0.0
        step, schedule = self._core.step_fn, self._core.scheduler.schedule

        def sleeping_step() -> Any:
            found = step()
            if not found[1]:
                time.sleep(IDLE_S)
            return found

        def noted_schedule(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            for it in output.scheduled_new_reqs:
                outcome = self._open.get(it.req_id.rsplit("-", 1)[0]) or self._open.get(it.req_id)
                if outcome is not None:
                    outcome.scheduled_s = self._now() - outcome.arrived
            return output

        self._core.step_fn, self._core.scheduler.schedule = sleeping_step, noted_schedule

    def run(self, asks: list[Ask], times: list[float], limit_s: float) -> list[Outcome]:
        """Outcomes, also of those that did not end in time."""
        self._begun = time.monotonic()
        outcomes: list[Outcome] = []
        self._open = {}
        while len(outcomes) < len(asks) or self._llm.has_unfinished_requests():
            now = self._now()
            while len(outcomes) < len(asks) and times[len(outcomes)] <= now:
                outcomes.append(self._add(asks[len(outcomes)], times[len(outcomes)]))
            if now > limit_s:
                self._llm.abort_request(list(self._open))
                break
            if self.busy:
                self.step()
            else:
                time.sleep(min(IDLE_S, max(0.0, times[len(outcomes)] - now)))
        return outcomes

    @property
    def busy(self) -> bool:
        return self._llm.has_unfinished_requests() or self._core.scheduler.has_requests()

    def settle(self, limit_s: float) -> None:
        """Steps until no transfer is left."""
        end = time.monotonic() + limit_s
        # Stores of a step are sent with the next one.
        steps = 5
        while steps > 0 or self.busy:
            if time.monotonic() > end:
                raise TimeoutError("transfers do not end")
            self.step()
            steps -= 1

    def step(self) -> None:
        for output in self._llm.step():
            outcome = self._open[output.request_id]
            found = output.outputs[0]
            now = self._now() - outcome.arrived
            if outcome.first_s is None and found.token_ids:
                outcome.first_s = now
            if output.finished:
                outcome.end_s, outcome.reason = now, found.finish_reason
                outcome.tokens, outcome.cached = list(found.token_ids), output.num_cached_tokens or 0

    def _add(self, ask: Ask, arrived: float) -> Outcome:
        from vllm import SamplingParams

        self._number += 1
        name = f"r{self._number}"
        outcome = self._open[name] = Outcome(arrived)
        params = SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True, detokenize=False)
        self._llm.add_request(name, {"prompt_token_ids": ask.prompt}, params)
        return outcome

    def _now(self) -> float:
        return time.monotonic() - self._begun
