"""The served model: synthetic, with a tokenizer of one letter or two a token and a small chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import Server, serve

from tests.wiring import synthetic


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = synthetic.build(tmp_path_factory.mktemp("served"))
    return synthetic.add_text(folder)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    yield from serve(model)
