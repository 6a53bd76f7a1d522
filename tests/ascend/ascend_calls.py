"""Calls that the Ascend tests share."""

from __future__ import annotations

from typing import Any

from pagegraft.custom_ops.conformance.call import Call, Setup, build


def half_call(seed: int = 0, **setup: Any) -> Call:
    """A float16 call with blocks of 16 unless the setup says otherwise."""
    return build(Setup(**{"compute": "float16", "block_size": 16, **setup}), seed)
