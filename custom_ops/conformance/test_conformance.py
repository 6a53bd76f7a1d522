"""The suite as pytest tests, for another project's CI. See custom_ops.pytest_plugin for the options."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from pagegraft.custom_ops.conformance import Backend, Case, run_case


def test_conformance(conformance_backend: Backend, conformance_case: Case, conformance_xfails: tuple[str, ...]) -> None:
    """Passes, fails, or is skipped as not claimed."""
    expected_to_fail = any(fnmatchcase(conformance_case.id, pattern) for pattern in conformance_xfails)
    result = run_case(conformance_backend, conformance_case, xfail=expected_to_fail)
    if result.status == "not claimed":
        pytest.skip(f"not claimed: {result.detail}")
    if result.status == "xfailed":
        pytest.xfail(result.detail)
    assert result.status != "xpassed", "passed although expected to fail: take it off the list"
    assert result.status == "passed", result.detail
