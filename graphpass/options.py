"""Options of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ConvertOptions"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `convert` does beyond the rewrite itself.

    `fuse`: take rotary embedding and q/k norm into the op where they are proven equal by evaluation.
    `verify`: run source and converted model side by side before the output folder appears.
    `link`: hard-link the source's data files instead of copying them.
    `target`: "cpu" for pagegraft's runtime.
    `max_positions`: longest context in tokens; None reads it from the source's config.json.
    `block_size`: default block size recorded for the runtime.
    """

    fuse: bool = True
    verify: bool = True
    link: bool = False
    target: Literal["cpu", "ort-cuda", "ascend"] = "cpu"
    max_positions: int | None = None
    block_size: int = 16
