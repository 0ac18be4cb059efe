"""Which weights a model has: the commit of a repository, or a fingerprint of files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "bitsandbytes", "gguf")
"""Load formats whose weights are the model's files."""
_SAMPLE = 4096
_SAMPLES = 256
_HEADER_MAX = 64 << 20


def identity(whole: VllmConfig) -> str | None:
    """None if that cannot be found out."""
    model = whole.model_config
    format_ = str(getattr(whole.load_config.load_format, "value", whole.load_config.load_format))
    if format_ == "dummy":
        return "dummy"
    if format_ not in _FILES:
        return None
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
    if re.fullmatch(r"[0-9a-f]{40}", commit):
        return commit
    return fingerprint(Path(model.model))


def fingerprint(model: Path) -> str | None:
    """Of all weight files: their sizes, and a sample of every tensor. Other weights of one shape differ in it.

    Read are some megabytes. None without weight files.
    """
    files = [model] if model.is_file() else sorted(it for it in model.glob("*") if it.suffix in _SUFFIXES)
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        name = path.name if path != model else ""
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            for place in _places(path, file):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    return f"files {digest.hexdigest()[:40]}"


def _places(path: Path, file: BinaryIO) -> Iterator[int]:
    """Where samples begin: at each tensor and in its middle, or all over a file without a table of them."""
    yield 0
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        length = int.from_bytes(file.read(8), "little")
        if length <= min(size, _HEADER_MAX):
            tensors = json.loads(file.read(length))
            spans = [it["data_offsets"] for name, it in tensors.items() if name != "__metadata__"]
            for begin, end in sorted(spans):
                yield 8 + length + begin
                yield 8 + length + max(begin, (begin + end) // 2)
            return
    yield from range(0, size, max(_SAMPLE, size // _SAMPLES))
