"""Which version of a serving engine an adapter was tried with."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version


def check(distribution: str, name: str, tested: str) -> None:
    """Warns of another version than the tested one, where the caller's caller is; one that is not installed says nothing."""
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return
    if found != tested:
        warnings.warn(f"kvbraid was tested with {name} {tested}, this is {found}", stacklevel=3)
