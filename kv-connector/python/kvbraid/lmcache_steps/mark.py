"""What a connector tells an adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass

METHOD = "kvbraid.mark"
TAKEN = b"taken"
"""The answer to a mark that was understood."""
_SENDER_MAX = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of one scheduler."""

    sender: str
    """Which one, of all that ever were."""
    number: int
    """Of two marks of a sender, the one with the larger number is the later one, whenever it comes."""
    forward: bool | None
    """Whether a forward pass runs. None: this is the sender's last mark."""
    lookups: int = 0
    """Requests looked up by the scheduling pass that has just ended; 0 for a mark of anything else."""

    def encode(self) -> bytes:
        return json.dumps([self.sender, self.number, self.forward, self.lookups]).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Mark:
        """Raises ValueError. What later versions append is not looked at."""
        match json.loads(payload):
            case [str(sender), int(number), bool() | None as forward, int(lookups), *_] if (
                0 < len(sender) <= _SENDER_MAX and number >= 0 and lookups >= 0
            ):
                return cls(sender, number, forward, lookups)
        raise ValueError("not a mark of kvbraid")
