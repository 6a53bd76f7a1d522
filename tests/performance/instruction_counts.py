"""Instructions that the kernel core executes for two fixed shapes: a figure that does not depend on the machine's load.

    python tests/performance/instruction_counts.py [--json]

The core's replay program runs under callgrind (needs valgrind and cmake) on the AVX2 path, which valgrind knows, once
with one call and once with two: the difference is one call, including its reading from the pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "cpu"))

from core_process import CoreProcess  # noqa: E402
from op_calls import make_feeds  # noqa: E402

SHAPES = {"decode": [(511, 1)] * 4, "prefill": [(0, 128)]}


def build(folder: Path) -> Path:
    """Compiles the replay program into `folder`; returns its path."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DPAGEGRAFT_TOOLS=ON"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", str(folder), "--target", "pagegraft_replay"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "custom_ops" / "cpu" / "pagegraft_replay"


def instructions(program: Path, lengths: list[tuple[int, int]], calls: int, folder: Path) -> int:
    """Instructions of a whole process that answers `calls` equal calls."""
    record = folder / "callgrind.out"
    valgrind = f"valgrind --quiet --tool=callgrind --callgrind-out-file={record} {program}"
    os.environ["PAGEGRAFT_CORE_REPLAY"] = valgrind
    core = CoreProcess()
    feeds = make_feeds(lengths, heads=8, kv_heads=2, head_size=64, block_size=16)
    for _ in range(calls):
        core.run(feeds, {"num_heads": 8, "kv_num_heads": 2})
    if core.close() != 0:
        raise RuntimeError("the replay program failed under callgrind")
    match = re.search(r"^(?:totals|summary): (\d+)", record.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{record} holds no total")
    return int(match.group(1))


def main() -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    os.environ["PAGEGRAFT_ISA"] = "avx2"
    with tempfile.TemporaryDirectory(prefix="pagegraft-counts-") as work:
        folder = Path(work)
        program = build(folder / "build")
        counts = {
            name: instructions(program, lengths, 2, folder) - instructions(program, lengths, 1, folder)
            for name, lengths in SHAPES.items()
        }
    if options.json:
        print(json.dumps(counts, indent=2))
    else:
        print("| shape | instructions a call |\n|---|---|")
        for name, count in counts.items():
            print(f"| {name} | {count:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
