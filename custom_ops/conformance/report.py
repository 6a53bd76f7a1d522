"""Reports of a conformance run: JSON, JUnit XML, and a summary of one screen."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from ..errors import ContractError
from .backends import Backend
from .run import Result, Status

__all__ = ["any_ran", "print_summary", "succeeded", "write_json", "write_junit"]

_SHOWN_FAILURES = 8
_STATUSES: tuple[Status, ...] = ("passed", "failed", "xfailed", "xpassed", "not claimed")
_ALWAYS_SHOWN = ("passed", "failed", "not claimed")


def succeeded(results: Sequence[Result]) -> bool:
    """True when something ran, nothing failed, and nothing that was expected to fail passed."""
    return any_ran(results) and not any(r.status in ("failed", "xpassed") for r in results)


def any_ran(results: Sequence[Result]) -> bool:
    """False when every case was outside the backend's claims."""
    return any(r.status != "not claimed" for r in results)


def write_json(path: Path, backend: Backend, results: Sequence[Result]) -> None:
    """Writes everything known of the run. Raises ContractError when the file cannot be written."""
    claims = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in vars(backend.capabilities()).items()}
    document = {
        "suite": "PagedAttention conformance",
        "backend": backend.name,
        "capabilities": claims,
        "versions": _versions(),
        "totals": dict(Counter(r.status for r in results)),
        "results": [asdict(r) for r in results],
    }
    _write(path, (json.dumps(document, indent=1) + "\n").encode())


def write_junit(path: Path, backend: Backend, results: Sequence[Result]) -> None:
    """Writes JUnit XML: one test suite a group; cases not claimed and expected failures are skipped tests.

    Raises ContractError when the file cannot be written.
    """
    root = ElementTree.Element("testsuites", name=f"PagedAttention conformance on {backend.name}")
    for group in dict.fromkeys(r.group for r in results):
        members = [r for r in results if r.group == group]
        red = sum(r.status in ("failed", "xpassed") for r in members)
        grey = sum(r.status in ("not claimed", "xfailed") for r in members)
        attributes = {"name": group, "tests": str(len(members)), "failures": str(red), "skipped": str(grey)}
        attributes["time"] = f"{sum(r.seconds for r in members):.3f}"
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for r in members:
            name = r.id.split("/", 1)[1]
            test = ElementTree.SubElement(suite, "testcase", classname=group, name=name, time=f"{r.seconds:.3f}")
            if r.status in ("failed", "xpassed"):
                ElementTree.SubElement(
                    test, "failure", message=_printable(r.detail) or "passed although expected to fail"
                )
            elif r.status != "passed":
                ElementTree.SubElement(test, "skipped", message=_printable(f"{r.status}: {r.detail}"))
    _write(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _printable(text: str) -> str:
    """XML has no place for the control characters that an error message may hold."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ContractError(f"cannot write the report {path}: {error.strerror}; give a writable path") from None


def print_summary(console: Console, backend: Backend, results: Sequence[Result]) -> None:
    """Prints a table by group, the first failures, and what is not claimed."""
    title = f"PagedAttention conformance: {backend.name}"
    table = Table(
        title=title, caption="* largest output error / tolerance", title_justify="left", caption_justify="left"
    )
    table.add_column("group", no_wrap=True)
    shown = [s for s in _STATUSES if s in _ALWAYS_SHOWN or any(r.status == s for r in results)]
    for status in shown:
        table.add_column(status, justify="right", no_wrap=True)
    table.add_column("worst*", justify="right")
    table.add_column("seconds", justify="right")
    for group in [*dict.fromkeys(r.group for r in results), "all"]:
        members = [r for r in results if group in (r.group, "all")]
        counts = Counter(r.status for r in members)
        worst = max((r.error for r in members if r.error is not None), default=None)
        row = [group, *(str(counts[s] or "") for s in shown), "" if worst is None else f"{worst:.3f}"]
        table.add_row(*row, f"{sum(r.seconds for r in members):.1f}", end_section=group == results[-1].group)
    console.print(table)
    red = [r for r in results if r.status in ("failed", "xpassed")]
    for r in red[:_SHOWN_FAILURES]:
        console.print(f"{r.status} {r.id}: {r.detail[:300]}", style="red", markup=False, highlight=False)
    if len(red) > _SHOWN_FAILURES:
        console.print(f"... and {len(red) - _SHOWN_FAILURES} more; --json FILE lists all", style="red")
    absent = Counter(r.detail for r in results if r.status == "not claimed")
    if absent:
        text = "; ".join(f"{reason} ({n})" for reason, n in absent.most_common(_SHOWN_FAILURES))
        console.print(f"not claimed: {text}", markup=False, highlight=False)


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("pagegraft", "onnxruntime", "onnx", "numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
