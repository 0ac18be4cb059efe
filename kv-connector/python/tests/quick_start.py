"""The quick starts of the READMEs, as they stand there, with this machine's paths and sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
READMES = (_ROOT / "README.md", _ROOT / "kv-connector/README.md")
TIERS = ("nvme", "all")
"""Directories of the tiers below a home."""
CHUNK = "1 MiB"
MEMORY = "64 MiB"


def fences(title: str) -> dict[str, list[str]]:
    """The fenced blocks of one section, by language."""
    text = "\n".join(it.read_text() for it in READMES)
    section = text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, list[str]] = {}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        found.setdefault(language, []).append(text)
    return found


def command(title: str, begin: str, end: str | None = None) -> list[str]:
    """The words of the section's command from `begin` on, up to `end`."""
    (text,) = fences(title)["text"]
    text = text[text.index(begin) :]
    return shlex.split(text[: text.index(end) if end else None].replace("\\\n", " "))


def configuration(title: str, home: Path, capacity: str, **other: str) -> Path:
    """The section's configuration, with these sizes; `other` replaces plain values."""
    (text,) = fences(title)["toml"]
    places = {"/run/kvbraid.sock": home / "sock"}
    places |= {path: home / tier for path, tier in zip(("/mnt/nvme/kv", "/mnt/parallel/kv"), TIERS, strict=True)}
    sizes = {"32 MiB": CHUNK, "4 GiB": MEMORY, "2 GiB": MEMORY, "1 TiB": capacity, "40 TiB": capacity}
    changes = {f'"{old}"': f'"{new}"' for old, new in {**places, **sizes}.items()}
    for name, value in other.items():
        (line,) = re.findall(rf"^{name} = \S+", text, re.MULTILINE)
        changes[line] = f"{name} = {value}"
    for old, new in changes.items():
        assert text.count(old) == 1, f"the README's configuration has no {old}"
        text = text.replace(old, new)
    path = home / "kvbraid.toml"
    path.write_text(text)
    return path
