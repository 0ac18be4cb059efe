"""What vLLM's steps cost, and how many tokens requests write: what the engine projects from when chunks are read."""

from __future__ import annotations

_WEIGHT = 0.2
_ENDED_MAX = 256


class Timeline:
    """Costs learned from the steps so far."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        """Outputs that ended by themselves and were not told yet."""
        self._step_s: float | None = None
        self._token_s: float | None = None

    def stepped(self, seconds: float, tokens: int, requests: int) -> None:
        """A step took so long for so many tokens of so many requests."""
        if tokens <= requests:
            self._step_s = _smoothed(self._step_s, seconds)
        elif self._step_s is None:
            self._token_s = _smoothed(self._token_s, seconds / tokens)
        else:
            self._token_s = _smoothed(self._token_s, max(0.0, seconds - self._step_s) / tokens)

    def finished(self, output_tokens: int) -> None:
        """A request ended by itself after so many."""
        self.ended = [*self.ended[1 - _ENDED_MAX :], output_tokens]

    @property
    def step_s(self) -> float:
        """A step that only decodes; 0 before there was one."""
        return self._step_s or 0.0

    @property
    def token_s(self) -> float:
        """A prompt's token."""
        return self._token_s or 0.0


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
