"""The checks of tests/performance/long_context.py at lengths that a suite has time for."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("length", "kv_dtype"), [(16_384, "float32"), (8_192, "int8")])
def test_needles_logits_streaming_and_memory(length: int, kv_dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the model is exported by torch")
    from tests.performance.long_context import measure

    assert measure(length, kv_dtype, tmp_path)["failed"] == []
