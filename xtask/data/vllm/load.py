"""What is asked, and when: the shape of a real trace, scaled down; the content is made up."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 32
"""Tokens for a block of the trace, which has 512: a block of vLLM on the processor."""
TRACE_BLOCK = 512
OUTPUT_PARTS = 64
"""Of the trace's output tokens one in so many is made."""
OUTPUT_MIN, OUTPUT_MAX = 2, 16
VOCABULARY = 512
FIRST = 3
"""Tokens below have meanings."""


@dataclass(frozen=True)
class Shape:
    """A request without its content."""

    blocks: tuple[int, ...]
    """Equal numbers are equal content, if all before are."""
    rest: int
    """Tokens behind the whole blocks."""
    output: int


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: list[int]
    output: int
    wanted: int
    """Tokens of it that a cache of any size has: those of earlier requests."""


def read(path: str, blocks_max: int) -> list[Shape]:
    """The trace's requests of up to so many blocks, in its order."""
    shapes = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            if len(entry["hash_ids"]) > blocks_max:
                continue
            length = max(BLOCK, entry["input_length"] * BLOCK // TRACE_BLOCK)
            whole, rest = divmod(length, BLOCK)
            output = min(OUTPUT_MAX, max(OUTPUT_MIN, entry["output_length"] // OUTPUT_PARTS))
            shapes.append(Shape(tuple(entry["hash_ids"][:whole]), rest, output))
    return shapes


def blocks_of(shapes: Iterable[Shape]) -> set[int]:
    return {block for shape in shapes for block in shape.blocks}


def fill(shapes: list[Shape], stored: set[int], cell: str) -> list[Ask]:
    """Their content. What is `stored` is the same in all cells, everything else is new in each."""
    asks, seen = [], set(stored)
    for number, shape in enumerate(shapes):
        prompt, known, is_known = [], 0, True
        for block in shape.blocks:
            is_known = is_known and block in seen
            known += BLOCK if is_known else 0
            prompt += _tokens(f"{'' if block in stored else cell}/{block}", BLOCK)
        prompt += _tokens(f"{cell}/rest {number}", shape.rest)
        # The last token is always computed.
        asks.append(Ask(prompt, shape.output, min(known, (len(prompt) - 1) // BLOCK * BLOCK)))
        seen.update(shape.blocks)
    return asks


def arrivals(count: int, per_s: float, cv: float, seed: str) -> list[float]:
    """Seconds after the begin, with gamma distributed pauses of this coefficient of variation, stretched to the rate."""
    if per_s <= 0:
        return [0.0] * count
    source = random.Random(seed)
    shape = 1 / cv**2
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += source.gammavariate(shape, 1.0)
    return [it * count / per_s / at for it in times]


def _tokens(seed: str, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(FIRST, VOCABULARY) for _ in range(count)]
