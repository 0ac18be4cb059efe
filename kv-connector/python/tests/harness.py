"""Runs the functions of a script whose names begin with `test_`, and says so in the words of Rust's test programs."""

from __future__ import annotations

import inspect
import sys
import tempfile
import traceback
from pathlib import Path


def run(tests: dict[str, object]) -> None:
    """Each test gets a directory of its own, if it wants one. Ends the process; its code says whether all passed."""
    functions = {name: it for name, it in tests.items() if name.startswith("test_") and callable(it)}
    chosen = {name: it for name, it in functions.items() if not sys.argv[1:] or sys.argv[1] in name}
    passed = failed = 0
    for name, test in chosen.items():
        with tempfile.TemporaryDirectory(prefix="kvbraid-") as directory:
            try:
                test(Path(directory)) if inspect.signature(test).parameters else test()
                print(f"test {name} ... ok", flush=True)
                passed += 1
            except BaseException:
                print(f"test {name} ... FAILED", flush=True)
                traceback.print_exc(file=sys.stdout)
                failed += 1
    word = "FAILED" if failed else "ok"
    print(f"test result: {word}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out", flush=True)
    sys.exit(1 if failed or not passed else 0)


def raises(kind: type[BaseException], words: str, call: object, *arguments: object, **named: object) -> None:
    """`call` raises `kind`, and its message has `words`."""
    try:
        call(*arguments, **named)
    except kind as error:
        assert words in str(error), f"`{error}` does not say `{words}`"
    else:
        raise AssertionError(f"no {kind.__name__}")


def namespace(**other: object) -> dict[str, object]:
    """A whole namespace."""
    return {
        "model": "meta-llama/Meta-Llama-3-8B",
        "weights": "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920",
        "dtype": "bfloat16",
        "layout": "2LTD",
        "chunk_tokens": 256,
        "serde": "raw",
        "hash_algorithm": "blake3",
        "hash_seed": "none",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "engine": "vllm",
        "engine_major": 0,
        **other,
    }


def config(directory: Path, chunk: str = "1 MiB", **engine: object) -> dict[str, object]:
    """An engine of two persistent tiers."""
    tier = {"kind": "nvme", "capacity": "256 MiB", "segment": "16 MiB"}
    return {
        "engine": {"chunk_bytes_max": chunk, "host_cache": "0 B", "staging": "64 MiB", "write_max_age_ms": 20, **engine},
        "tier": [{"name": name, "path": str(directory / name), **tier} for name in ("fast", "slow")],
        "namespace": namespace(),
    }
