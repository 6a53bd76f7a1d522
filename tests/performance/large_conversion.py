"""What converting a large model takes: memory, and time against copying or hard-linking its files, in one run.

    python tests/performance/large_conversion.py SOURCE SCRATCH [--rounds 2]

SOURCE is a model with external data (tests/model/large_source.py writes one of any size), SCRATCH an empty folder on
the same disk with room for one copy. Every conversion and every copy is a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """Wall seconds, processor seconds, and the most memory held at once, in bytes."""

    wall: float
    processor: float
    peak: int


def run(command: list[str]) -> Run:
    """Runs a command to its end."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}")
    return Run(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    source, out = str(given.source), given.scratch / "out"
    convert = [str(Path(sys.executable).with_name("pagegraft")), "convert", source, str(out)]
    commands = {
        "cp -r": ["cp", "-r", source, str(out)],
        "convert": convert,
        "convert --no-verify": [*convert, "--no-verify"],
        "cp -rl": ["cp", "-rl", source, str(out)],
        "convert --link": [*convert, "--link"],
        "convert --link --no-verify": [*convert, "--link", "--no-verify"],
    }
    given.scratch.mkdir(parents=True, exist_ok=True)
    for number in range(1, given.rounds + 1):
        for name, command in commands.items():
            found = run(command)
            shutil.rmtree(out)
            print(
                f"round {number}  {name:28} {found.wall:7.1f} s wall {found.processor:7.1f} s processor "
                f"{found.peak / 2**20:7.0f} MiB peak",
                flush=True,
            )


if __name__ == "__main__":
    main()
