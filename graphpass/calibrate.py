"""Static scales of quantised caches, from what a float-cache model stores while it reads a text.

int8: the largest value of a channel becomes code 112 of 127, which leaves some room for larger ones in other texts:
what is clipped costs more than coarser steps. fp8 e4m3: it becomes 224, half of the range; there the headroom is free,
because fp8 keeps its relative precision down to small numbers. int4: of several clipping points the one with the least
squared error, because seven steps are too few to spend them on rare outliers. A channel never gets a scale below 1/256
of its head's largest one, so that a channel that was silent in the text can speak later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops.files import writing

from .errors import KvCacheError
from .evaluate import Array
from .external_data import load_graph
from .packed import PackedModel
from .rewrite.cache_dtype import CacheFormat, LayerScales
from .rewrite.rotation import rotations
from .texts import TokenText, file_text

__all__ = ["KvScales", "calibrate", "compute_scales", "feed_text", "windows_of"]

#: The code that the largest value seen becomes.
_TOP_CODE: Final = {"int8": 112.0, "float8e4m3fn": 224.0, "int4": 7.0}
_FLOOR: Final = 1.0 / 256.0
#: Fractions of the largest value at which int4 may clip.
_CLIPS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_FORMAT: Final = "pagegraft-kv-scales"
_VERSION: Final = 1
#: Tokens of a text that are one sequence at most, and computed in one step.
_LONGEST: Final = 4096
_CHUNK: Final = 128
#: Tokens of a sequence when several sequences are to stand at different positions.
_SHORT: Final = 128
#: How often each key is turned to a random position of the context.
_MOVES: Final = 4


@dataclass(frozen=True, kw_only=True)
class KvScales:
    """Static scales of every layer, for one format; `source_digest` names the source model they belong to."""

    form: CacheFormat
    layers: tuple[LayerScales, ...]
    source_digest: str
    origin: str

    def save(self, path: Path) -> None:
        """Writes JSON; its decimal numbers give back the same float32.

        The file appears whole or not at all. Raises KvCacheError when it cannot be written.
        """
        layers = [{"key": _numbers(layer.key), "value": _numbers(layer.value)} for layer in self.layers]
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "dtype": self.form.dtype,
            "quant": self.form.quant,
            "source_digest": self.source_digest,
            "origin": self.origin,
            "layers": layers,
        }
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        with writing(path, KvCacheError, "name a file in a folder of yours"):
            try:
                partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> KvScales:
        """Reads what `save` wrote. Raises KvCacheError for anything else."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] != _FORMAT or raw["version"] != _VERSION:
                raise KvCacheError(f"{path} is of another version; make it with: pagegraft calibrate MODEL TEXT")
            layers = tuple(LayerScales(key=_array(e["key"]), value=_optional(e["value"])) for e in raw["layers"])
            form = CacheFormat(dtype=raw["dtype"], quant=raw["quant"])
            return cls(form=form, layers=layers, source_digest=raw["source_digest"], origin=raw["origin"])
        except OSError as error:
            raise KvCacheError(
                f"{path} cannot be read ({error.strerror}); name a file of pagegraft calibrate"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, KvCacheError):
                raise
            raise KvCacheError(f"{path} holds no scales; make it with: pagegraft calibrate MODEL TEXT") from None


def _numbers(array: Array | None) -> Any:
    return None if array is None else array.tolist()


def _array(numbers: Any) -> Array:
    return np.asarray(numbers, np.float32)


def _optional(numbers: Any) -> Array | None:
    return None if numbers is None else _array(numbers)


def calibrate(folder: Path | str, text: Path | str, form: CacheFormat) -> KvScales:
    """Static scales for a converted model whose caches are floats, from a text file.

    Raises ManifestError for what is no converted model, KvCacheError when it or the text cannot be used.
    """
    folder = Path(folder)
    manifest = names.Manifest.load(folder)
    if not form.static:
        raise KvCacheError(f"a {form.dtype} cache with scales {form.quant} needs no calibration")
    if any(layer.quant != "NONE" for layer in manifest.layers):
        raise KvCacheError(f"{folder} has quantised caches; calibrate a conversion without --kv-dtype")
    tokens = file_text(Path(text), folder, manifest.vocab_size)
    return compute_scales(folder / manifest.model_file, manifest, tokens, form)


def compute_scales(model: Path, manifest: names.Manifest, text: TokenText, form: CacheFormat) -> KvScales:
    """Runs the float-cache model over the text and takes the scales from what its caches then hold.

    Keys are also counted as they would be at other positions of the model's context: turned by the node's own rotary
    tables, or, where the graph rotates them, computed at other position ids.
    """
    rng = np.random.default_rng(7)
    longest = manifest.max_positions
    windows = windows_of(text.tokens, longest)
    offsets = [0] * len(windows)
    if manifest.positions == "position_ids" and longest is not None:
        windows = windows_of(text.tokens, min(longest, _SHORT))
        offsets = [0, *(int(rng.integers(0, longest - len(w) + 1)) for w in windows[1:])]
    packed = PackedModel(model, manifest, num_blocks=blocks_for(windows, 16), block_size=16, threads=0)
    for number, (window, offset) in enumerate(zip(windows, offsets, strict=True)):
        packed.place(number, offset)
        feed_text(packed, number, window)
    layers = []
    turned = rotations(load_graph(model), manifest)
    for index, (layer, rotation) in enumerate(zip(manifest.layers, turned, strict=True)):
        keys = _collect(packed, index, "key", len(windows))
        if rotation is not None:
            position_T = np.concatenate([np.arange(len(w)) for w in windows])
            bound = min(len(rotation.angles), longest or len(rotation.angles))
            moved = [rotation.move(keys, position_T, rng.integers(0, bound, len(keys))) for _ in range(_MOVES)]
            keys = np.concatenate([keys, *moved])
        value = None
        if layer.value_head_size is not None:
            value = _scale(_collect(packed, index, "value", len(windows)), form)
        layers.append(LayerScales(key=_scale(keys, form), value=value))
    digest = str(manifest.source.get("digest", ""))
    return KvScales(form=form, layers=tuple(layers), source_digest=digest, origin=text.origin)


def windows_of(tokens: Sequence[int], max_positions: int | None) -> list[tuple[int, ...]]:
    """A text cut into sequences that the model's context holds."""
    length = min(_LONGEST, max_positions or _LONGEST)
    return [tuple(tokens[i : i + length]) for i in range(0, len(tokens), length)]


def blocks_for(windows: Sequence[Sequence[int]], block_size: int) -> int:
    """Blocks that hold all the sequences at once."""
    return sum(-(-len(window) // block_size) for window in windows)


def feed_text(packed: PackedModel, sequence: int, tokens: Sequence[int]) -> None:
    """Computes the tokens of one sequence for what they leave in the caches."""
    for start in range(0, len(tokens), _CHUNK):
        packed.step([(sequence, tokens[start : start + _CHUNK])])


def _collect(packed: PackedModel, layer: int, part: str, sequences: int) -> Array:
    """`[tokens, G, D]` float32."""
    return np.concatenate([packed.stored(layer, part, s) for s in range(sequences)]).astype(np.float32)


def _scale(x_TGD: Array, form: CacheFormat) -> Array:
    """`[1]` or `[G, 1, D]`."""
    if not np.isfinite(x_TGD).all():
        raise KvCacheError("the model stores values that are not finite; it cannot be calibrated")
    if form.quant == "PER_TENSOR":
        x_TGD = x_TGD.reshape(-1, 1, 1)
    top_GD = np.abs(x_TGD).max(axis=0)
    top_GD = np.maximum(top_GD, _FLOOR * top_GD.max(axis=1, keepdims=True))
    best_GD = top_GD / _TOP_CODE[form.dtype]
    if form.dtype == "int4":
        best_GD = _least_error(x_TGD, best_GD)
    scale = best_GD.astype(np.float32)
    return np.asarray(scale.reshape(1) if form.quant == "PER_TENSOR" else scale[:, None, :])


def _least_error(x_TGD: Array, largest_GD: Array) -> Array:
    """Of each channel's scales at `_CLIPS`, the one with the least squared error."""
    errors = []
    for clip in _CLIPS:
        code_TGD = np.clip(np.rint(x_TGD / np.maximum(largest_GD * clip, 1e-30)), -8, 7)
        errors.append(np.mean((code_TGD * largest_GD * clip - x_TGD) ** 2, axis=0))
    choice = np.asarray(_CLIPS)[np.argmin(errors, axis=0)]
    return np.asarray(largest_GD * choice)
