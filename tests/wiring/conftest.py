"""Synthetic models, built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wiring import synthetic

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def synthetic_model(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds the synthetic model with given windows (one layer each), once for each combination."""
    built: dict[tuple[object, ...], Path] = {}

    def build(*windows: int | None, **facts: object) -> Path:
        key = (windows, *sorted(facts.items()))
        if key not in built:
            built[key] = synthetic.build(tmp_path_factory.mktemp("synthetic"), windows or (None,), **facts)
        return built[key]

    return build
