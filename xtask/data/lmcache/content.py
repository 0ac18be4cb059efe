"""What a chunk holds, worked out from its number: nothing that was read is believed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

POISON = 0xA5


class Content:
    """The bytes of chunks of one size: one table, in each chunk under another mask."""

    def __init__(self, chunk_bytes: int) -> None:
        table = hashlib.shake_128(b"kvbraid side by side").digest(chunk_bytes)
        self._table = np.frombuffer(table, dtype=np.uint64)
        self._due = np.empty_like(self._table)

    def digest(self, number: int) -> bytes:
        """The 32 bytes that name a chunk."""
        return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()

    def fill(self, number: int, memory: Any) -> None:
        """Writes the chunk."""
        np.bitwise_xor(self._table, self._mask(number), out=self._words(memory))

    def wrong_bytes(self, number: int, memory: Any) -> int:
        """Bytes that are not the chunk's; afterwards the memory holds nothing of it, so that no later read passes by it."""
        words = self._words(memory)
        np.bitwise_xor(self._table, self._mask(number), out=self._due)
        wrong = 0
        if not np.array_equal(words, self._due):
            wrong = int(np.count_nonzero(words.view(np.uint8) != self._due.view(np.uint8)))
        words.view(np.uint8).fill(POISON)
        return wrong

    def _mask(self, number: int) -> np.uint64:
        return np.frombuffer(self.digest(number)[:8], dtype=np.uint64)[0]

    def _words(self, memory: Any) -> Any:
        return np.frombuffer(memory.byte_array, dtype=np.uint64)
