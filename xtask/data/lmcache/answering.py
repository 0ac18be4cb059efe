"""A process that does what it is told on standard input, a line of JSON each, and answers likewise."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def drop_pages(paths: list[str]) -> None:
    """What the page cache holds of these files is not read from a device."""
    for root in paths:
        place = Path(root)
        for file in place.rglob("*") if place.is_dir() else [place]:
            if file.is_file():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def serve(do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Until it is told to close. It does not return: threads of a back end must not keep it."""
    # Whatever else is printed must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = do(order)
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        if order["do"] == "close":
            break
    os._exit(0)
