"""Converts the demo's source model by the `pagegraft convert` command, as a user would, and keeps the result.

The command runs in a process of its own: runtime does not import graphpass, and the memory that conversion and
verification took is free again before the engine starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from ...custom_ops.errors import ManifestError
from ...custom_ops.files import writing
from ...custom_ops.manifest import Manifest, file_digest
from .cache import ELSEWHERE, exclusive
from .errors import DemoError

__all__ = ["conversion_summary", "convert_once"]

_COMMAND_LINE = "from pagegraft.custom_ops.main import main; main()"


def convert_once(source: Path, target: Path, console: Console) -> bool:
    """Make `target` from `source` unless this version has made it from this very source; True when it was made.

    The report of the conversion is kept beside `target`, for `conversion_summary`.

    Raises:
        DemoError: the conversion failed; it has said why on stderr.
    """
    with exclusive(target.parent):
        if _is_current(source, target):
            return False
        # The command replaces an earlier conversion only by a complete one.
        arguments = ["convert", str(source), str(target)]
        console.print(f"$ pagegraft {' '.join(arguments)}", style="bold", soft_wrap=True, highlight=False)
        # -P keeps the working folder out of the module search path. What the command prints is summed up instead.
        report = _report_file(target)
        command = [sys.executable, "-P", "-c", _COMMAND_LINE, *arguments, "--report", str(report)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise DemoError(f"{source} could not be converted: see the message above")
        with writing(report, DemoError, ELSEWHERE):
            record = {"pagegraft": version("pagegraft"), **_read_report(target)}
            report.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return True


def conversion_summary(target: Path) -> list[tuple[str, str]]:
    """What the pass did, as pairs of heading and text."""
    report = _read_report(target)
    layers, checked = report["layers"], report["verification"]
    first = layers[0]
    forms = ", ".join(dict.fromkeys(layer["form"] for layer in layers))
    masks = ", ".join(sorted({layer["mask"] for layer in layers}))
    fused = ", ".join(dict.fromkeys(name for layer in layers for name in layer["fused"])) or "nothing"
    return [
        ("found", f"{len(layers)} attentions ({forms}), {first['heads']} query heads on {first['kv_heads']} KV heads"),
        ("mask", f"{masks} (evaluated, not matched)"),
        ("taken into the op", fused),
        ("nodes", f"{report['nodes_before']} became {report['nodes_after']}"),
        ("inputs before", _brief(report["inputs_before"])),
        ("inputs after", _brief(report["inputs_after"])),
        ("KV cache", f"{report['kv_bytes_per_token'] / 1024:.0f} KiB a token"),
        (
            "verified",
            f"{checked['tokens']} tokens of {checked['sequences']} sequences against the source model: logits within "
            f"{checked['difference']:.1e} of their standard deviation",
        ),
    ]


def _brief(names: Sequence[str]) -> str:
    caches = [name for name in names if name.startswith("past_key_values.")]
    others = [name for name in names if name not in caches]
    return ", ".join([*others, f"{len(caches)} caches"])


def _read_report(target: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(_report_file(target).read_text(encoding="utf-8"))
    return report


def _report_file(target: Path) -> Path:
    return target.with_name(target.name + ".report.json")


def _is_current(source: Path, target: Path) -> bool:
    try:
        manifest, report = Manifest.load(target), _read_report(target)
    except (ManifestError, OSError, ValueError):
        return False
    made_by_this = report.get("pagegraft") == version("pagegraft")
    return made_by_this and manifest.source.get("digest") == file_digest(source / "model.onnx")
