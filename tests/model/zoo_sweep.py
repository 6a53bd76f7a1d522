"""Converts every model of a folder with verification and prints what became of each.

    python tests/model/zoo_sweep.py PATH [--json FILE]

Exit status 1 when a conversion is wrong (a refusal with a reason is not an error).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pagegraft.custom_ops import PagegraftError
from pagegraft.graphpass import ConvertOptions, NotConvertible, Report, VerificationError, convert
from rich.console import Console
from rich.table import Table


def sweep_one(source: Path) -> dict[str, Any]:
    """Converts one model into a temporary folder; a row of the table."""
    started = time.perf_counter()
    row: dict[str, Any] = {"model": source.name, "converted": False, "wrong": False, "kind": ""}
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = _convert(source, Path(folder) / "out")
        except NotConvertible as error:
            row |= {"kind": error.kind, "reason": str(error)}
        except VerificationError as error:
            row |= {"kind": "wrong", "reason": str(error), "wrong": True}
        except PagegraftError as error:
            row |= {"kind": "error", "reason": str(error), "wrong": True}
        else:
            masks = dict.fromkeys(layer.mask for layer in report.layers)
            row |= {
                "converted": True,
                "form": ", ".join(dict.fromkeys(layer.form for layer in report.layers))
                + (", requantised" if "requantised" in report.verification else ""),
                "masks": ", ".join(masks),
                "fused": ", ".join(report.layers[0].fused),
                "nodes": f"{report.nodes_before} -> {report.nodes_after}",
                "difference": report.verification["difference"],
                "context_fraction": report.verification["context_fraction"],
            }
    row["seconds"] = time.perf_counter() - started
    return row


def _convert(source: Path, out: Path) -> Report:
    """Conversion, with activations requantised per token only where that is the reason of a refusal."""
    try:
        return convert(source, out)
    except NotConvertible as error:
        if error.kind != "dynamic-quantisation":
            raise
        return convert(source, out, ConvertOptions(requantize=True))


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a model, then the counts."""
    table = Table()
    for column in ("model", "nodes", "form", "masks", "fused", "difference", "of context", "s"):
        table.add_column(column, overflow="fold")
    for row in rows:
        if row["converted"]:
            numbers = (f"{row['difference']:.1e}", f"{row['context_fraction']:.4%}")
            table.add_row(
                row["model"], row["nodes"], row["form"], row["masks"], row["fused"], *numbers, f"{row['seconds']:.1f}"
            )
        else:
            table.add_row(
                row["model"], f"[red]{row['kind']}[/red]", row["reason"], "", "", "", "", f"{row['seconds']:.1f}"
            )
    Console(width=180).print(table)
    converted = [row for row in rows if row["converted"]]
    worst = max((row["difference"] for row in converted), default=0.0)
    print(f"{len(converted)} of {len(rows)} converted and verified, largest difference {worst:.1e} of the deviation")
    print("not converted:", dict(Counter(row["kind"] for row in rows if not row["converted"])))


def main() -> int:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("path", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for source in sorted(p for p in arguments.path.iterdir() if p.is_dir()):
        rows.append(sweep_one(source))
        print(f"{source.name}: {'ok' if rows[-1]['converted'] else rows[-1]['kind']}", file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print_table(rows)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
