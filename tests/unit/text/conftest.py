"""The small tokenizers as fixtures."""

from __future__ import annotations

import pytest
from pagegraft.runtime.text import Tokenizer
from small_tokenizers import MAKERS, WINDOWED


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    """Every kind, made once."""
    return {kind: Tokenizer(make()) for kind, make in {**MAKERS, **WINDOWED}.items()}


@pytest.fixture(params=list(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    """One after the other, those with an exact form."""
    return tokenizers_by_kind[request.param]
