"""The tables of README.md that are derived from `spec.py` and from what the conformance suite knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from math import log2
from pathlib import Path

from . import spec
from .conformance.backends import FEATURES, Capabilities
from .conformance.tolerance import MOST_DIFFERING_CODES, UNIT_ROUNDOFF, stored_steps

__all__ = ["readme_text"]

_README = Path(__file__).resolve().parent / "README.md"
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def readme_text() -> str:
    """README.md with its generated tables brought up to date."""
    tables = {
        "inputs": _parameters(spec.INPUTS),
        "outputs": _parameters(spec.OUTPUTS),
        "attributes": _attributes(),
        "tolerances": _tolerances(),
        "capabilities": _capabilities(),
        "features": _table(("feature", "covers"), ((f"`{name}`", text) for name, text in FEATURES.items())),
    }
    return _BLOCK.sub(lambda m: m[1] + tables[m[2]] + m[3], _README.read_text(encoding="utf-8"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _types(p: spec.ParameterSpec) -> str:
    added = [t for t in p.pagegraft_types if t not in p.microsoft_types]
    text = ", ".join(p.microsoft_types)
    return text + (f"{'; ' if text else ''}pagegraft: {', '.join(added)}" if added else "")


def _parameters(parameters: Iterable[spec.ParameterSpec]) -> str:
    rows = (
        (str(int(p.index)), f"`{p.name}`" + (" (optional)" if p.optional else ""), f"`{p.shape}`", _types(p), p.doc)
        for p in parameters
    )
    return _table(("index", "name", "shape", "element types", "meaning"), rows)


def _attributes() -> str:
    rows = []
    for a in spec.ATTRIBUTES:
        default = "required" if a.required else "derived" if a.default is None else f"`{a.default!r}`"
        if a.pagegraft_only:
            default = "absent; domain pagegraft only"
        rows.append((f"`{a.name}`", a.kind, default, a.doc))
    return _table(("name", "type", "default", "meaning"), rows)


def _tolerances() -> str:
    rows = []
    for compute, roundoff in UNIT_ROUNDOFF.items():
        steps = ", ".join(
            f"{cache} {stored_steps(compute, cache, transformed=True)}" for cache in spec.QUANTISED_CACHE_DTYPES
        )
        exponent = f"2^{round(log2(roundoff))}"
        rows.append((compute, exponent, f"2 * {exponent} * V + accumulation", "1", steps))
    head = ("compute type", "unit roundoff", "output error", "code steps", "after norm or rotary")
    note = (
        "\nV is the largest value that the call can read; the accumulation term is that of float32. Where a cache "
        "holds int8 or\nint4 codes, query and weights may be rounded to 16-bit integers as well. Copied values are "
        f"bit-identical.\nAt most {MOST_DIFFERING_CODES:.0%} of the codes (and two more) may be a step off, unless "
        "norm or rotary came before.\n"
    )
    return _table(head, rows) + note


def _capabilities() -> str:
    claims = {
        "compute_dtypes": "element types of query, key and value",
        "cache_dtypes": "logical cache types",
        "block_sizes": "values of B",
        "features": "parts of the contract, listed below",
        "head_size_multiple": "D and Dv are multiples of this",
        "max_head_size": "largest D and Dv",
        "bad_ids": "forbidden block ids and slots: `error`, or `masked` (treated as -1)",
        "validates": "other malformed calls raise an error",
        "bitwise": "outputs do not depend on the batch in any bit",
        "max_cache_bytes": "largest cache tensor that is run; far block ids want 5 GiB of (untouched) address space",
    }
    rows = []
    for f in fields(Capabilities):
        value = getattr(Capabilities(), f.name)
        default = "all" if isinstance(value, frozenset) else f"`{value!r}`"
        rows.append((f"`{f.name}`", default, claims[f.name]))
    return _table(("claim", "default", "meaning"), rows)
