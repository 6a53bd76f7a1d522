"""Writes the files that are derived from `spec.py`, so that the contract is stated once.

    python -m pagegraft.custom_ops.generate [--check]

`--check` writes nothing and exits with 1 when a derived file is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from . import spec
from .generate_docs import readme_text

__all__ = ["cpu_header", "main", "stale_files", "targets"]

_HERE = Path(__file__).resolve().parent


def _camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _names(symbol: str, parameters: tuple[spec.ParameterSpec, ...]) -> list[str]:
    by_index = {int(p.index): p.name for p in parameters}
    names = [f'"{by_index.get(i, "")}"' for i in range(max(by_index) + 1)]
    return [f"inline constexpr const char* {symbol}[] = {{", *(f"    {name}," for name in names), "};"]


def cpu_header() -> str:
    """Text of `cpu/contract.h`: indices, names and limits of the contract for C++."""
    lines = [
        "// Indices, names and limits of the PagedAttention contract.",
        "// Generated from spec.py by `python -m pagegraft.custom_ops.generate`; do not edit.",
        "#pragma once",
        "",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        "namespace pagegraft::contract {",
        "",
        f'inline constexpr const char* kOpType = "{spec.OP_TYPE}";',
        f'inline constexpr const char* kMicrosoftDomain = "{spec.MICROSOFT_DOMAIN}";',
        f'inline constexpr const char* kPagegraftDomain = "{spec.PAGEGRAFT_DOMAIN}";',
        f"inline constexpr int kOpVersion = {spec.OP_VERSION};",
        f"inline constexpr std::int64_t kUnmapped = {spec.UNMAPPED};",
        f"inline constexpr std::int64_t kMaxBlockSize = {spec.MAX_BLOCK_SIZE};",
        "",
        "enum In : std::size_t {",
        *(f"  {_camel(p.name)} = {int(p.index)}," for p in spec.INPUTS),
        f"  kInputCount = {max(int(p.index) for p in spec.INPUTS) + 1},",
        "};",
        "",
        "enum Out : std::size_t {",
        *(f"  {_camel(p.name)} = {int(p.index)}," for p in spec.OUTPUTS),
        f"  kMicrosoftOutputCount = {max(int(p.index) for p in spec.OUTPUTS if p.microsoft_types) + 1},",
        f"  kOutputCount = {max(int(p.index) for p in spec.OUTPUTS) + 1},",
        "};",
        "",
        *_names("kInputNames", spec.INPUTS),
        "",
        *_names("kOutputNames", spec.OUTPUTS),
        "",
        "inline constexpr bool kInputOptional[] = {",
        *(f"    {'true' if p.optional else 'false'},  // {p.name}" for p in spec.INPUTS),
        "};",
        "",
        "}  // namespace pagegraft::contract",
    ]
    return "\n".join(lines) + "\n"


def targets() -> Mapping[Path, str]:
    """Every derived file and the text it should have."""
    return {_HERE / "cpu" / "contract.h": cpu_header(), _HERE / "README.md": readme_text()}


def stale_files() -> list[Path]:
    """The derived files whose text is not what `spec.py` says. Needs the source tree."""
    return [path for path, text in targets().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report stale files")
    stale = stale_files()
    if parser.parse_args().check:
        for path in stale:
            print(f"stale: {path}; run: python -m pagegraft.custom_ops.generate", file=sys.stderr)
        return 1 if stale else 0
    texts = targets()
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
