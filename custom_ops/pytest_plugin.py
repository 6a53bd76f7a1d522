"""Options of `pytest --pyargs pagegraft.custom_ops.conformance`; a pytest plugin that is silent in every other run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_PACKAGE = "pagegraft.custom_ops.conformance"


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Adds `--backend`, `--group` and `--xfails` when the suite is among the arguments."""
    if not any(argument.startswith(_PACKAGE) for argument in args):
        return
    group = parser.getgroup("pagegraft", "PagedAttention conformance")
    group.addoption("--backend", default="cpu", help="cpu, reference, or package.module:Class")
    group.addoption("--group", action="append", default=[], help="only this group of cases; may be repeated")
    group.addoption("--xfails", type=Path, help="file with ids of cases that are expected to fail")
