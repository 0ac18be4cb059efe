"""Marks of steps and forward passes: what the server's module and the adapter make of them, and who sends them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvbraid
from harness import config, raises
from kvbraid.lmcache_steps import steps, teller
from kvbraid.lmcache_steps.mark import METHOD, TAKEN, Mark
from kvbraid.lmcache_steps.server import MarksModule, build_server_modules
from kvbraid.lmcache_steps.teller import Marks, Teller
from lmcache_rig import SIZE, Memory, adapter, object_key, payload, store

SOON = 30.0
NEVER_MS = 600_000
ANSWER = SimpleNamespace(success=True, payload=TAKEN, error="")


def module(*adapters: Any) -> MarksModule:
    """As a server with these adapters makes it."""
    manager = SimpleNamespace(l2_adapters=lambda: [(None, it) for it in adapters])
    return build_server_modules(SimpleNamespace(server_context=SimpleNamespace(storage_manager=manager), config={}))


def told(to: MarksModule, sender: str, number: int, forward: bool | None, lookups: int = 0) -> bool:
    return to.mark(Mark(sender, number, forward, lookups).encode()) == TAKEN


def pending(made: Any) -> int:
    return made.report_status()["stats"]["pending_writes"]


def is_written(made: Any) -> bool:
    end = time.monotonic() + SOON
    while pending(made) and time.monotonic() < end:
        time.sleep(0.01)
    return pending(made) == 0


class Stores:
    """Chunks, each new."""

    def __init__(self, made: Any) -> None:
        self.made, self.count = made, 0

    def one(self) -> None:
        self.count += 1
        assert store(self.made, [object_key(self.count)], [payload(self.count)])

    def is_held(self) -> bool:
        self.one()
        before = pending(self.made)
        time.sleep(0.2)
        return 0 < before == pending(self.made)


def test_writes_wait_until_some_sender_computes_or_none_is_left(directory: Path) -> None:
    made = adapter(config(directory, write_max_age_ms=NEVER_MS))
    marks, stores = module(made), Stores(made)
    stores.one()
    assert is_written(made), "without marks nothing waits"
    assert told(marks, "a", 1, False) and stores.is_held()
    assert told(marks, "b", 1, True) and is_written(made)
    assert told(marks, "a", 2, True) and told(marks, "b", 2, False)
    stores.one()
    assert is_written(made), "one of them computes"
    assert told(marks, "a", 4, False) and told(marks, "a", 3, True) and stores.is_held(), "a late mark is an old one"
    assert told(marks, "a", 5, None) and stores.is_held(), "the other one is there"
    assert told(marks, "b", 3, None) and is_written(made)
    assert made.report_status()["marks"]["marks"] == 8
    made.close()
    assert told(marks, "a", 1, False), "a closed engine needs none"


def test_senders_that_fall_silent_hold_nothing_for_ever(directory: Path) -> None:
    made = adapter(config(directory, write_max_age_ms=NEVER_MS))
    marks, stores = module(made), Stores(made)
    lapsed, steps.LAPSED_S = steps.LAPSED_S, 0.5
    try:
        assert told(marks, "a", 1, False) and stores.is_held()
        time.sleep(0.5)
        stores.one()
        assert is_written(made)
    finally:
        steps.LAPSED_S = lapsed
    aged = adapter(config(directory / "aged", write_max_age_ms=200))
    assert told(module(aged), "a", 1, False)
    Stores(aged).one()
    assert is_written(aged), "age comes before marks"
    made.close()
    aged.close()


def test_a_step_is_whole_when_all_that_was_looked_up_is_submitted(directory: Path) -> None:
    # Who waits for others is late.
    queue = {"gather_us": 1_000_000, "deadline_ms": 900}
    made = adapter({**config(directory), "queue": queue})
    keys = [object_key(n) for n in range(8)]
    assert store(made, keys, [payload(n) for n in range(8)]) and made._engine.flush(SOON)
    marks = module(made)
    stale, steps.STALE_S = steps.STALE_S, SOON
    tasks: dict[int, int] = {}

    def request(wanted: list[Any], loaded: int) -> None:
        """Looked up, and what comes first of it loaded."""
        assert made.query_lookup_and_lock_result(made.submit_lookup_and_lock_task(wanted, {})) is not None
        if loaded < len(wanted):
            made.submit_unlock(wanted[loaded:])
        if loaded:
            tasks[made.submit_load_task(wanted[:loaded], [Memory(SIZE) for _ in range(loaded)])] = loaded

    def loaded() -> list[bool]:
        """For each load, whether it has all its chunks."""
        came, end = [], time.monotonic() + SOON
        for task, count in tasks.items():
            while (bits := made.query_load_result(task)) is None:
                assert time.monotonic() < end
                time.sleep(0.002)
            came.append(bits.popcount() == count)
        tasks.clear()
        return came

    def closed() -> int:
        return made.report_status()["marks"]["steps_closed"]

    try:
        request(keys[:4], 4)
        assert closed() == 0 and loaded() == [False], "without a mark it waits for others"
        assert told(marks, "a", 1, True, lookups=3) and closed() == 0
        # The look-up before is one of the three.
        request(keys[:3], 3)
        request([object_key(99)], 0)
        assert closed() == 1 and loaded() == [True]
        request(keys[:4], 2)
        request(keys[4:], 0)
        assert told(marks, "a", 2, True, lookups=3) and closed() == 1, "one look-up is still to come"
        request(keys[4:6], 2)
        assert closed() == 2 and loaded() == [True, True]
        stats = made.report_status()["stats"]
        assert stats["steps"] == 2 and stats["hits"] == 7, (stats["steps"], stats["hits"])
        steps.STALE_S = 0.0
        assert told(marks, "a", 3, True, lookups=1)
        time.sleep(0.01)
        request(keys[:1], 1)
        assert closed() == 2 and loaded() == [False], "a look-up that never came closes no later step"
    finally:
        steps.STALE_S = stale
    made.close()


def test_what_is_no_mark_is_refused_and_changes_nothing(directory: Path) -> None:
    made = adapter(config(directory))
    marks = module(made)
    long = Mark("x" * 65, 1, True).encode()
    for odd in (b"", b"{}", b"\xff", b"[]", b'["a"]', b'["a", -1, true, 0]', b'["a", 1, 2, 0]', b'["a", 1, true, -1]', long):
        assert marks.mark(odd) != TAKEN, odd
    assert made.report_status()["marks"]["marks"] == 0
    assert marks.mark(b'["a", 1, true, 0, "more"]') == TAKEN, "what later versions say is read"
    for n in range(steps.SENDERS_MAX + 5):
        told(marks, f"s{n}", 1, True)
    report = made.report_status()["marks"]
    assert report["senders"] == steps.SENDERS_MAX and report["refused"] == 6, report
    assert marks.report_status() == {"kvbraid_marks": {"taken": steps.SENDERS_MAX, "refused": 15}}
    made.close()
    assert b"no L2 adapter" in module(SimpleNamespace()).mark(Mark("a", 1, True).encode())
    raises(kvbraid.ConfigError, "nothing to be set", build_server_modules, SimpleNamespace(config={"x": 1}))


class Future:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def query(self) -> bool:
        return self.answer is not None

    def result(self, timeout: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Server:
    """Answers as it is told; its futures may be answered later."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.futures: list[Future] = []
        self.marks: list[Mark] = []

    def server_module_call(self, request: Any) -> Future:
        assert request.method == METHOD
        self.marks.append(Mark.decode(request.payload))
        self.futures.append(Future(self.answer))
        return self.futures[-1]


def turns(sender: Teller, count: int) -> None:
    """Marks, each of another state than the one before."""
    for n in range(count):
        sender.tell(n % 2 == 0)


def test_a_server_that_does_not_hear_is_sent_next_to_nothing() -> None:
    limits = teller.ANSWER_S, teller.SILENT_S
    teller.ANSWER_S, teller.SILENT_S = 0.05, 0.2
    refusal = SimpleNamespace(success=False, payload=b"", error="unknown server module method")
    try:
        for answer in (None, refusal, SimpleNamespace(success=True, payload=b"why"), ConnectionError("gone")):
            server = Server(answer)
            sender = Teller(server, "one")
            turns(sender, 100)
            assert len(server.marks) == 1, answer
            time.sleep(0.1)
            turns(sender, 100)
            assert len(server.marks) == 1, "it is silent"
            time.sleep(0.3)
            server.answer = ANSWER
            turns(sender, 100)
            assert len(server.marks) > 50, "it hears now"
            assert [it.number for it in server.marks] == list(range(1, len(server.marks) + 1))
            # It is restarted without the module, or hangs.
            server.answer = None
            before = len(server.marks)
            turns(sender, 500)
            assert len(server.marks) <= before + teller.OPEN_MAX
    finally:
        teller.ANSWER_S, teller.SILENT_S = limits


def test_a_scheduler_tells_when_passes_begin_and_have_run() -> None:
    servers = {"one": Server(ANSWER), "two": Server(ANSWER)}
    scheduler = SimpleNamespace(req_clients=servers, lmcache_tokens_per_chunk=64, is_healthy=True)
    marks = Marks(scheduler)

    def request(name: str, tokens: int) -> Any:
        return SimpleNamespace(request_id=name, num_tokens=tokens)

    def said() -> list[tuple[bool | None, int]]:
        ones, twos = ([(it.forward, it.lookups) for it in server.marks] for server in servers.values())
        assert ones == twos
        for it in servers.values():
            it.marks.clear()
        return ones

    for name, tokens in (("a", 64), ("b", 63), ("c", 100), ("a", 64)):
        marks.asked(request(name, tokens), None)
    marks.scheduled(False)
    marks.ran()
    assert said() == [(False, 2)], "a step without a pass, of two requests that are worth a look-up"
    for _ in range(5):
        marks.asked(request("a", 64), None)
        marks.scheduled(False)
        marks.ran()
    assert said() == [], "nothing new"
    marks.asked(request("a", 64), 64)
    marks.scheduled(True)
    assert said() == [(True, 0)]
    # The next one is scheduled before it has run.
    marks.scheduled(True)
    marks.ran()
    marks.scheduled(False)
    assert said() == []
    marks.ran()
    marks.ran()
    assert said() == [(False, 0)]
    marks.ended(request("c", 100))
    marks.asked(request("c", 100), None)
    marks.scheduled(True)
    assert said() == [(True, 1)]
    scheduler.is_healthy = False
    marks.ran()
    assert said() == [], "the server is away"
    marks.leave()
    assert said() == [(None, 0)]
    scheduler.is_healthy = True
    marks.scheduled(False)
    assert said() == []


def unheard(url: str) -> None:
    """A real server without the module: one mark is sent, it is not heard, and the server serves on."""
    import zmq
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    limits = teller.ANSWER_S, teller.SILENT_S
    teller.ANSWER_S, teller.SILENT_S = 1.0, 60.0
    client = RequestClientFactory.create(url, context=zmq.Context.instance())
    try:
        sender = Teller(client, url)
        turns(sender, 10)
        assert sender._number == 1 and len(sender._open) == 1
        time.sleep(1.1)
        turns(sender, 10)
        assert sender._number == 1 and not sender._open
        assert client.ping(None).result(timeout=SOON) is True
    finally:
        client.close()
        teller.ANSWER_S, teller.SILENT_S = limits
