"""Options of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pagegraft.custom_ops.manifest import is_block_size
from pagegraft.custom_ops.spec import MAX_BLOCK_SIZE

from .errors import OptionError

__all__ = ["ConvertOptions", "Target"]

Target = Literal["cpu", "ort-cuda", "ascend"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `convert` does beyond the rewrite itself. Raises OptionError for values that cannot work.

    `fuse`: take rotary embedding, q/k norm and the split of packed query, key and value into the op where they are
        proven equal by evaluation.
    `requantize`: quantise activations per token where the source quantises them per tensor at run time.
    `verify`: run source and converted model side by side before the output folder appears.
    `link`: hard-link the source's data files instead of copying them.
    `target`: "cpu" for pagegraft's runtime.
    `max_positions`: longest context in tokens; None reads it from the source's config.json.
    `block_size`: default block size recorded for the runtime.
    `kv_dtype`: what the caches store: float32, float16, bfloat16, int8, int4 or fp8; None is the compute type.
    `kv_quant`: granularity of a quantised cache's scales: per-token (int8 only), per-channel or per-tensor; None is
        per-token for int8 (per-channel where the target has no other), per-channel for int4 and fp8.
    `kv_scales`: a file of `calibrate` with static scales; None computes those needed from a bundled text.
    """

    fuse: bool = True
    requantize: bool = False
    verify: bool = True
    link: bool = False
    target: Target = "cpu"
    max_positions: int | None = None
    block_size: int = 16
    kv_dtype: str | None = None
    kv_quant: str | None = None
    kv_scales: Path | None = None

    def __post_init__(self) -> None:
        if self.target not in get_args(Target):
            raise OptionError(f"target '{self.target}' is unknown; there are: {', '.join(get_args(Target))}")
        if self.max_positions is not None and not (isinstance(self.max_positions, int) and self.max_positions >= 1):
            raise OptionError(f"max_positions={self.max_positions!r}: must be a whole number of at least 1")
        if not is_block_size(self.block_size):
            raise OptionError(f"block_size={self.block_size!r}: must be a power of two up to {MAX_BLOCK_SIZE}")
