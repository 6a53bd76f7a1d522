"""Instruments the kernel's source so that each synchronisation call can be left out at run time, one at a time."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pagegraft.custom_ops.ascend.build import ROOT, compile_sources

_STATEMENT = re.compile(
    r"(?P<call>(?:PipeBarrier<\w+>\(\)|SyncAll(?:<\w+>)?\(\)|(?:Set|Wait)Flag<HardEvent::\w+>\(\w+\)|"
    r"CrossCore(?:SetFlag<2, \w+>|WaitFlag)\(\w+\)|\w+\.(?:EnQue|FreeTensor)\(\w+\)));"
)
_DEQUE = re.compile(r"(?P<queue>\w+)\.template DeQue<(?P<type>\w+)>\(\)")


@dataclass(frozen=True)
class Site:
    """A synchronisation call of the kernel: where it is and what is left out."""

    file: str
    line: int
    text: str


def instrument(folder: Path) -> list[Site]:
    """Copies the Ascend sources to `folder` with every synchronisation call switchable; returns them by number."""
    for name in ("op_kernel", "op_host", "emulator"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc", "__pycache__"))
    sites: list[Site] = []
    for path in sorted((folder / "op_kernel").iterdir()):
        if path.suffix not in (".h", ".cpp"):
            continue
        lines = [_switchable(path.name, i, line, sites) for i, line in enumerate(path.read_text().splitlines(), 1)]
        path.write_text("\n".join(lines) + "\n")
    return sites


def _switchable(file: str, number: int, line: str, sites: list[Site]) -> str:
    if line.lstrip().startswith("//"):
        return line

    def guard(match: re.Match[str]) -> str:
        sites.append(Site(file, number, match["call"]))
        return f"if (::emu::ActiveMachine()->mutant != {len(sites) - 1}) {{ {match['call']}; }}"

    def choose(match: re.Match[str]) -> str:
        sites.append(Site(file, number, match[0]))
        sites.append(Site(file, number, f"the wait of {match[0]}"))
        queue, kind, mutant = match["queue"], match["type"], "::emu::ActiveMachine()->mutant"
        left_out = f"{mutant} == {len(sites) - 2} ? {queue}.template EmuNoDeQue<{kind}>()"
        no_wait = f"{mutant} == {len(sites) - 1} ? {queue}.template EmuDeQueWithoutWait<{kind}>()"
        return f"({left_out} : {no_wait} : {match[0]})"

    return _DEQUE.sub(choose, _STATEMENT.sub(guard, line))


def build_instrumented(folder: Path) -> tuple[Path, list[Site]]:
    """Library of the instrumented kernel and its sites."""
    sites = instrument(folder)
    objects = folder / "objects"
    objects.mkdir()
    return compile_sources(folder, objects, "g++", ("-std=c++17", "-O1", "-fPIC")), sites
