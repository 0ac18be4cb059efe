"""The native half. The interpreter lock is released around all that blocks or copies."""

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

from typing_extensions import Buffer

class Error(Exception):
    """Everything that kvbraid raises."""

class ConfigError(Error):
    """A configuration value; says the field and what to write."""

class OpenError(Error):
    """A tier, memory or a thread that cannot be had."""

class ClosedError(Error):
    """The engine was closed."""

class ForkedError(Error):
    """This process is a fork of the one that opened the engine."""

class KeyError(Error):
    """What is given for a key makes none."""

class SizeError(Error):
    """A buffer of the wrong size or kind, or another number of buffers than keys."""

class InternalError(Error):
    """A bug in kvbraid."""

def _at_exit() -> None:
    """Closes all engines before the interpreter ends."""

@final
class Key:
    """Which chunk. Equal and hashable by value."""

    @property
    def digest(self) -> bytes:
        """The 16 bytes that name it in events."""

@final
class KeySpace:
    """Makes the keys of one namespace."""

    def __new__(cls, namespace: dict[str, Any]) -> Self:
        """The fields of `[namespace]` in the configuration. Raises ConfigError."""

    def key(
        self,
        chunk_hash: bytes,
        *,
        kv_rank: int = 0,
        object_group: int = 0,
        salt: str | bytes | None = None,
    ) -> Key:
        """The key of one chunk; its hash has 8 to 64 bytes. Raises KeyError."""

    def keys(self, chunks: Sequence[tuple[int, bytes]]) -> list[Key]:
        """The keys of many chunks, each given by its object group and its hash. Raises KeyError."""

@final
class Region:
    """Memory that pages are cut from; it stays in place as long as this or one of its pages lives."""

    def __new__(cls, buffer: Buffer) -> Self:
        """All of a contiguous buffer. Raises SizeError."""

    def pages(self, addresses: Sequence[int], sizes: Sequence[int], count: int) -> list[Page]:
        """Cuts `count` pages, each of as many pieces: their addresses and sizes, page after page.

        A page is its pieces in ascending order. Raises SizeError if one is not in the region, or two overlap.
        """

    def __len__(self) -> int: ...

@final
class Page:
    """A page of a region, wherever its pieces lie: to be given in place of a buffer."""

    def __len__(self) -> int: ...

@final
class Load:
    """A load on its way, with the buffers that it goes to."""

    @property
    def done(self) -> bool:
        """Whether every chunk has come or is a miss."""

    def __len__(self) -> int: ...
    def wait(self, timeout_s: float) -> bool:
        """Waits until there is something to take, or all is done; whether one is so."""

    def take(self) -> list[bool] | None:
        """Copies what has come into the buffers: only then does their memory serve other chunks.

        None while it is not done; then one bool for each chunk, whether its buffer holds its verified bytes. That answer is
        given once, later all are False. Nothing is written into the buffers but in here.
        """

@final
class Fill:
    """Buffers that a thread of the engine fills. Dropping it takes them back: none is written afterwards."""

    @property
    def done(self) -> bool:
        """Whether every buffer is filled or a miss."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is done; whether it is."""

    def hits(self) -> list[bool] | None:
        """None while it is not done; then one bool for each buffer, whether it holds its chunk's verified bytes."""

@final
class Stage:
    """Buffers that a thread of the engine copies to staging. Dropping it takes them back: none is read afterwards."""

    @property
    def done(self) -> bool:
        """Whether every buffer was copied or refused."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is done; whether it is."""

    def results(self) -> list[str] | None:
        """None while it is not done; then the words of Engine.store, one for each chunk."""

@final
class Seek:
    """A question to tiers that other nodes write into."""

    @property
    def done(self) -> bool:
        """Whether all have answered, or their time is up: then Engine.contains knows what was found."""

@final
class Engine:
    """Reads and writes chunks on all tiers of a node. Shared between threads."""

    def __new__(cls, config: str | os.PathLike[str] | dict[str, Any], *, rank: int = 0, ranks: int | None = None) -> Self:
        """Opens the tiers of a configuration: a path, TOML text, or a dict. Raises ConfigError or OpenError.

        With `ranks` it is one of so many engines of this node that are opened from the same configuration: directories
        and the socket become the rank's own, capacities, windows, memory and rates are divided. A directory that many
        nodes share stays as it is.
        """

    @property
    def namespace(self) -> dict[str, Any] | None:
        """`[namespace]` of the configuration."""

    @property
    def persistent(self) -> bool:
        """Whether any tier outlives this process."""

    @property
    def shared(self) -> bool:
        """Whether any tier is one that other ranks and nodes use, too."""

    @property
    def closed(self) -> bool: ...
    @property
    def load_fd(self) -> int:
        """An eventfd: some load has something to take, or has ended."""

    @property
    def room_fd(self) -> int:
        """An eventfd: staging has room again, after ring_when_room()."""

    def ring_when_room(self) -> None: ...
    @property
    def chunk_bytes_max(self) -> int:
        """The longest chunk that it takes."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Which chunks are readable now: from memory, without a wait and without releasing the interpreter lock."""

    def seek(self, keys: Sequence[Key]) -> Seek | None:
        """Has tiers that other nodes write into look for chunks not known here. None if there is nothing to ask."""

    def lookup(self, keys: Sequence[Key]) -> list[bool]:
        """Which chunks are readable now. From memory."""

    def lock(self, keys: Sequence[Key]) -> list[bool]:
        """Which chunks are readable now; those stay so until they are unlocked as often."""

    def unlock(self, keys: Sequence[Key]) -> int:
        """Takes back one lock of each chunk; the number of those that had none."""

    def submit_load(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Buffer | Page],
        ranks: Sequence[int] | None = None,
    ) -> Load:
        """Queues the load of chunks into writable buffers, each exactly as long as its chunk. Does not block."""

    def submit_step(self, loads: Sequence[tuple[Sequence[Key], Sequence[Buffer]]]) -> list[Fill]:
        """Queues the loads of one whole scheduler step, which are read as one pool, at once. Does not block.

        Unlike with submit_load, a thread of the engine copies what comes into the buffers, until it is done.
        """

    def end_step(self) -> None:
        """Says that the step is whole: no other loads are waited for than those that submit_load has queued."""

    def submit_store(self, keys: Sequence[Key], buffers: Sequence[Buffer], wait_s: float = 0.0) -> Stage:
        """As store, by a thread of the engine; chunks wait for room in staging, wait_s from now at most. Does not block."""

    def store(self, keys: Sequence[Key], buffers: Sequence[Buffer | Page]) -> list[str]:
        """Copies chunks into staging; they are readable from then on, and written later.

        For each `staged`, `held`, or why it was refused: `staging_full`, `queue_full`, `too_large`, `no_tier`, `closed`.
        """

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        """Removes chunks that are neither locked nor still to be written; for each, whether nothing of it is readable."""

    def claim(self, request: str, keys: Sequence[Key], time_to_use_s: float | None = None) -> int:
        """Says that a request will read those chunks that tiers of kind flash hold; how many these are.

        It costs nothing until the time until use falls to the time until they are ready; then they are brought into fast
        memory and kept there. The load that reads all of them ends the claim; a second claim of a request replaces the first.
        None: the time is projected from the claims before it.
        """

    def revise(self, times_s: Mapping[str, float | None]) -> int:
        """Other times until use, by request; how many of these have a claim."""

    def schedule(
        self,
        running: Sequence[tuple[str, int, int, int | None]],
        waiting: Sequence[tuple[str, int, int, int | None]],
        *,
        slots: int,
        iteration_s: float,
        iteration_s_per_request: float = 0.0,
        prompt_token_s: float = 0.0,
        read_ahead: int = 0,
        ended: Sequence[int] = (),
    ) -> int:
        """What a scheduler runs and has waiting after an iteration; how many claims it names.

        Each request is its name, the tokens of its prompt still to be computed (without those to be read), those written so
        far, and the most that it may write. Waiting ones come in the order in which they will start; `read_ahead` of them
        begin to read with the first. `ended` are the lengths of outputs that ended by themselves since the last call.
        The engine projects when claims are used and how likely; this replaces the times given with them.
        """

    def cancel(self, request: str) -> bool:
        """Gives up what a request claimed, in any state; whether it had a claim."""

    def purge(self, model: str) -> bool:
        """Removes all chunks of a model that are not locked; whether nothing of it is left. One purge at a time."""

    def kept(self, model: str) -> list[dict[str, Any]]:
        """Chunks of a model that are on tiers now, by key; of very many some. Reads the header of every chunk.

        `chunk_hash`, `kv_rank`, `object_group`, `salt`, `namespace`, `payload_bytes`, `digest`. Empty while a purge runs.
        """

    def gone(self) -> list[bytes]:
        """Digests of chunks that left the last tier since the last call; of very many, the latest."""

    def forward_began(self) -> None:
        """The serving engine began a forward pass: a good time for writes. Optional."""

    def forward_ended(self) -> None: ...
    def flush(self, timeout_s: float) -> bool:
        """Writes everything staged; whether nothing is left."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, and which `rank` of how many `ranks` of the node this is."""

    def close(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Writes what is staged and closes the tiers. A second call does nothing; all others then raise ClosedError."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
