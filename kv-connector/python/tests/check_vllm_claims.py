"""A real vLLM with a queue of 40 requests over a tier of kind flash, and the costs that its claims follow."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import vllm_cpu
from harness import run
from tiny_model import make
from vllm_cpu import Vllm, tiering

os.environ["PYTHONHASHSEED"] = "0"
HOME = Path(tempfile.mkdtemp(prefix="kvbraid-claims-"))
COUNT = 24
BUSY = 96
"""Tokens of the requests that the queue waits for: many steps."""
SLOTS = 4
QUEUE = 40


def prompts() -> list[list[int]]:
    """Some share their beginning."""
    source = random.Random(11)
    made = [[source.randrange(3, 512) for _ in range(source.choice((170, 260, 330)))] for _ in range(QUEUE)]
    for n in range(0, QUEUE, 4):
        made[n + 1][:96] = made[n][:96]
    return made


def settings(connector: dict[str, Any]) -> dict[str, Any]:
    tier = {"name": "f", "kind": "flash", "path": str(HOME / "flash"), "capacity": "256 MiB"}
    tier["flash"] = {"protected_bytes": "64 MiB"}
    engine = {"chunk_bytes_max": "64 KiB", "host_cache": "0", "staging": "64 MiB", "cache_stores": False}
    config = {"engine": {**engine, "write_max_age_ms": 20}, "tier": [tier]}
    return {**tiering({"type": "Tier", "module_path": "kvbraid.vllm", "config": config}, primary=64 << 20), **connector}


CLAIMING = {"kv_connector": "ClaimingConnector", "kv_connector_module_path": "kvbraid.vllm.claims"}


class Shared:
    """An engine takes some seconds to start."""

    plain: list[list[int]]
    order: list[str]
    engine: Vllm


def claims(engine: Vllm) -> dict[str, Any]:
    return engine.stats()["tiers"][0]["claims"]


class Queue:
    """Requests added at once behind some that run, stepped one by one."""

    def __init__(self, engine: Vllm) -> None:
        self.llm = engine.llm.llm_engine
        self.order: list[str] = []
        """In which requests were scheduled first."""
        self.tokens: dict[str, list[int]] = {}
        scheduler = engine.core.scheduler
        inner = scheduler.schedule

        def schedule(*arguments: Any, **named: Any) -> Any:
            output = inner(*arguments, **named)
            self.order += [it.req_id.split("-")[0] for it in output.scheduled_new_reqs]
            return output

        scheduler.schedule = schedule
        self.restore = lambda: setattr(scheduler, "schedule", inner)

    def add(self, name: str, prompt: list[int], count: int = COUNT) -> None:
        from vllm import SamplingParams

        ask = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.llm.add_request(name, {"prompt_token_ids": prompt}, ask)

    def step(self) -> None:
        for output in self.llm.step():
            if output.finished:
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)

    def run(self) -> None:
        while self.llm.has_unfinished_requests():
            self.step()
        self.restore()


def busy() -> list[list[int]]:
    """Prompts of requests that hold all slots while the queue builds up, too short for a chunk."""
    source = random.Random(5)
    return [[source.randrange(3, 512) for _ in range(30)] for _ in range(SLOTS)]


def whole_run(engine: Vllm) -> Queue:
    queue = Queue(engine)
    for n, prompt in enumerate(busy()):
        queue.add(f"busy{n}", prompt, BUSY)
    for _ in range(3):
        queue.step()
    for n, prompt in enumerate(prompts()):
        queue.add(f"q{n}", prompt)
    return queue


def opened(transfer: dict[str, Any]) -> Vllm:
    """Loads of a step end with it: then the order of requests is the queue's, and does not depend on the disk."""
    engine = Vllm(HOME / "model", transfer, max_num_seqs=SLOTS)
    inner = engine.tier.on_schedule_end

    def end_step(context: object) -> None:
        inner(context)
        engine.tier.drain_jobs()

    engine.tier.on_schedule_end = end_step
    return engine


def test_costs_are_learned_from_steps_and_outputs_told_once() -> None:
    from kvbraid.vllm.timeline import Timeline

    line = Timeline()
    assert (line.step_s, line.token_s) == (0.0, 0.0)
    line.stepped(0.1, 2, 2)
    line.stepped(1.1, 100, 2)
    assert (round(line.step_s, 6), round(line.token_s, 6)) == (0.1, 0.01)
    for length in range(300):
        line.finished(length)
    assert line.ended == list(range(44, 300))


def test_tokens_and_order_without_claims() -> None:
    make(HOME / "model")
    engine = opened(settings({}))
    assert not hasattr(engine.core.scheduler.connector, "claims")
    queue = whole_run(engine)
    queue.run()
    Shared.plain = [queue.tokens[f"q{n}"] for n in range(QUEUE)]
    assert len({tuple(it) for it in Shared.plain}) == QUEUE, "the prompts say the same: nothing would show"
    engine.written()
    # Once more, now read from the tier: this is what claims are compared with.
    engine.forget()
    queue = whole_run(engine)
    queue.run()
    assert [queue.tokens[f"q{n}"] for n in range(QUEUE)] == Shared.plain
    Shared.order = queue.order
    assert claims(engine)["recorded"] == 0 and engine.stats()["hits"] > QUEUE
    engine.close()


def test_claims_are_recorded_while_requests_wait_and_revised_each_step() -> None:
    engine = Shared.engine = opened(settings(CLAIMING))
    queue = whole_run(engine)
    found = claims(engine)
    assert found["recorded"] == sum(found["states"].values()) == QUEUE, found
    assert found["staged_chunks"] == found["released"] == 0, found
    revised, schedules = found["revised"], found["schedules"]
    assert schedules > 0, found
    for n in range(1, 4):
        queue.step()
        found = claims(engine)
        assert (found["revised"], found["schedules"]) == (revised + n * QUEUE, schedules + n), found
    assert (found["policy"], found["use_by"]) == ("tempo_q", "tokens"), found
    queue.run()
    found = claims(engine)
    assert found["released"] == QUEUE and found["states"]["recorded"] == 0, found
    assert found["staged_chunks"] > 0 and found["protected_chunks"] > 0, found
    assert found["reserved_bytes_max"] <= found["budget_bytes"], found
    # The same tokens, in the same order.
    assert [queue.tokens[f"q{n}"] for n in range(QUEUE)] == Shared.plain
    assert queue.order == Shared.order, (queue.order, Shared.order)


def test_an_aborted_request_gives_its_claim_up() -> None:
    engine = Shared.engine
    engine.written()
    engine.forget()
    before = claims(engine)
    queue = whole_run(engine)
    queue.step()
    gone = [f"q{n}" for n in range(0, QUEUE, 2)]
    queue.llm.abort_request(gone)
    found = claims(engine)
    assert found["cancelled"] - before["cancelled"] == len(gone), found
    queue.run()
    kept = range(1, QUEUE, 2)
    assert [queue.tokens[f"q{n}"] for n in kept] == [Shared.plain[n] for n in kept]
    found = claims(engine)
    assert sum(found["states"].values()) == 0 and found["reserved_bytes"] == 0, found


def test_a_failure_in_the_claims_costs_the_claims_only() -> None:
    engine = Shared.engine
    engine.forget()
    connector = engine.core.scheduler.connector
    connector.claims._work = lambda *_: 1 / 0
    queue = whole_run(engine)
    queue.run()
    assert connector.claims is None
    assert [queue.tokens[f"q{n}"] for n in range(QUEUE)] == Shared.plain
    assert sum(claims(engine)["states"].values()) == 0
    engine.close()


if __name__ == "__main__":
    run(globals())
