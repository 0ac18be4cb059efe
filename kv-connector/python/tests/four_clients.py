"""Four worker processes of one LMCache server: each stores sequences of its own and reads them back, all at once.

Arguments: the server's two URLs, and the sequences of each. Forked after the imports, which take longer than all else.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from typing import IO

from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.main import main

WORKERS = 4


def work(number: int, rpc: str, http: str, count: int, out: IO[bytes]) -> None:
    """In a process of its own: LMCache's own client, which compares checksums."""
    code = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        # By this the server tells the memory of one from that of another.
        helpers._INSTANCE_ID_BASE += 100 * number
        begin = number * count
        words = f"bench server --rpc-url {rpc} --url {http} --mode cpu --num-tokens 1024 --interval 0.01"
        words += f" --start {begin} --end {begin + count} --kvcache-shape-spec (2,256,16,2,64):bfloat16:4"
        sys.argv = ["lmcache", *words.split()]
        code = main() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(rpc: str, http: str, count: int) -> None:
    files = [tempfile.TemporaryFile() for _ in range(WORKERS)]
    children = []
    for number, out in enumerate(files):
        pid = os.fork()
        if pid == 0:
            work(number, rpc, http, count, out)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    for number, (code, out) in enumerate(zip(codes, files, strict=True)):
        out.seek(0)
        said = out.read().decode(errors="replace")
        found = {name: int(n) for name, n in re.findall(r"(Total requests|Checksum OK|Checksum FAIL)\D+(\d+)", said)}
        if code != 0 or found != {"Total requests": count, "Checksum OK": count, "Checksum FAIL": 0}:
            sys.exit(f"worker {number} ended with {code}: {found}\n{said[-3000:]}")
        print(f"worker {number}: {found['Checksum OK']} of {count} sequences came back right")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
