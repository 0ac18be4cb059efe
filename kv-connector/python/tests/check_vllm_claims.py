"""A real vLLM with a queue of 40 requests over a tier of kind flash, and the timeline that its claims follow."""

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


def test_the_first_slot_to_be_free_says_when_the_queue_is_read() -> None:
    from kvbraid.vllm.timeline import Timeline, Work

    line = Timeline(slots=2, chunks_above=5)
    line.stepped(0.1, 2, 2)
    line.stepped(1.1, 100, 2)
    for length in (10, 20, 30):
        line.finished(length)
    running = [Work("a", 0, 4, 100), Work("b", 0, 15, 100)]
    waiting = [Work(f"w{n}", 50, 0, 100, chunks=2) for n in range(4)]
    times = line.project(running, waiting)
    # b makes 5 more, a 6 more; what finds no room above waits for its own slot.
    assert [round(times[f"w{n}"], 3) for n in range(3)] == [0.5, 0.5, 2.0], times
    assert line.project(running[:1], waiting)["w0"] == 0.0
    assert line.project([], []) == {}


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
    revised = found["revised"]
    for n in range(1, 4):
        queue.step()
        assert claims(engine)["revised"] == revised + n * QUEUE, claims(engine)
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
    connector.claims._timeline.project = lambda *_: 1 / 0
    queue = whole_run(engine)
    queue.run()
    assert connector.claims is None
    assert [queue.tokens[f"q{n}"] for n in range(QUEUE)] == Shared.plain
    assert sum(claims(engine)["states"].values()) == 0
    engine.close()


if __name__ == "__main__":
    run(globals())
