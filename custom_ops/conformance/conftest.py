"""Fixtures of the suite's pytest entry: `pytest --pyargs pagegraft.custom_ops.conformance --backend ...`.

Its options come from `custom_ops.pytest_plugin`: pytest reads options from a conftest of a `--pyargs` package too late.
"""

from __future__ import annotations

import pytest
from pagegraft.custom_ops.conformance import all_cases, load_backend
from pagegraft.custom_ops.conformance.run import read_xfails


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case."""
    if "conformance_case" in metafunc.fixturenames:
        groups = metafunc.config.getoption("--group")
        cases = [c for c in all_cases() if not groups or c.group in groups]
        metafunc.parametrize("conformance_case", cases, ids=[c.id for c in cases])


@pytest.fixture(scope="session")
def conformance_backend(pytestconfig: pytest.Config) -> object:
    """The backend under test."""
    return load_backend(pytestconfig.getoption("--backend"))


@pytest.fixture(scope="session")
def conformance_xfails(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """Patterns of cases expected to fail."""
    path = pytestconfig.getoption("--xfails")
    return read_xfails(path) if path else ()
