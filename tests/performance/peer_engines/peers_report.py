"""The table of all runs: medians, ratios to pagegraft, and how far the outputs agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .contenders import Contender

__all__ = ["report"]

_COLUMNS = (
    "engine",
    "weights",
    "KV cache",
    "output tokens/s",
    "of pagegraft",
    "first token, mean",
    "peak memory",
    "same tokens",
)


def report(folder: Path, requests: int, contenders: Sequence[Contender]) -> None:
    """Prints a Markdown table of the runs with so many requests."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["requests"] == requests and "error" not in entry:
            runs.setdefault(entry["name"], []).append(entry)
    base = contenders[0].name
    if base not in runs:
        raise SystemExit(f"there is no run of {base} with {requests} requests in {folder}")
    rate = _rate(runs[base])
    print("| " + " | ".join(_COLUMNS) + " |")
    print("|" + "---|" * len(_COLUMNS))
    for contender in contenders:
        if entries := runs.get(contender.name):
            first = [entry["ttft_seconds_mean"] for entry in entries if entry["ttft_seconds_mean"]]
            print(
                f"| {contender.title} ({entries[-1]['version']}) | {contender.weights} | {contender.cache} "
                f"| {_rate(entries):.0f}{_spread(entries)} | {_rate(entries) / rate:.2f} "
                f"| {f'{median(first):.1f} s' if first else ''} "
                f"| {median(entry['peak_bytes'] for entry in entries) / 2**30:.1f} GiB "
                f"| {_agreement(folder, base, contender.name, entries[-1])} |"
            )


def _rate(entries: Sequence[dict[str, Any]]) -> float:
    return median(entry["output_tokens"] / entry["seconds"] for entry in entries)


def _spread(entries: Sequence[dict[str, Any]]) -> str:
    rates = [entry["output_tokens"] / entry["seconds"] for entry in entries]
    return f" ({min(rates):.0f} to {max(rates):.0f} in {len(rates)} runs)" if len(rates) > 1 else ""


def _agreement(folder: Path, base: str, name: str, entry: dict[str, Any]) -> str:
    """Share of output tokens before the first that differs from `base`'s, over all requests."""
    if name == base:
        return ""
    ours, theirs = (
        json.loads((folder / "outputs" / f"{n}-{entry['requests']}-{entry['seed']}.json").read_text())
        for n in (base, name)
    )
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same, total = same + differs, total + len(a)
    return f"{same / total:.0%}"
