"""The source model as an oracle: what onnxruntime runs to say what is right."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from .evaluate import Array
from .normalise import Source, load
from .output import save_with_data
from .packed import SourceModel
from .paging.oracle import PagedSourceModel
from .passes import Analysis
from .requantise import requantise
from .upcast import upcast_bfloat16

__all__ = ["source_model"]


@contextmanager
def source_model(
    source: Source,
    analysis: Analysis,
    scratch: Path,
    *,
    longest: int = 1024,
    as_given: bool = False,
    nudged: bool = False,
) -> Iterator[SourceModel | PagedSourceModel]:
    """The source in onnxruntime, with its caches wired up; a bfloat16 one in float32, as the conversion is.

    A float32 copy lies in `scratch` until the block ends. `longest` is the most tokens of a sequence.
    A source whose activations are quantised per token is given one token at a time, which is what that means; without
    a past it is run rewritten. `as_given`: it is neither. `nudged`: with its vectors one unit in the last place off (a
    source that finds its pages itself is not).
    """
    links = [link for site in analysis.sites for link in (*site.key_cache, *site.value_cache)]
    requantised = bool(analysis.requantised) and not as_given
    with _runnable(source, scratch, requantize=requantised and not analysis.probe.has_past) as file:
        if analysis.pages is not None:
            yield PagedSourceModel(file, analysis.pages, longest=longest)
            return
        yield SourceModel(
            file,
            {c.name or "": analysis.probe.cache_shape(c) for c in analysis.interface.caches},
            {link.past.name or "": link.present.name or "" for link in links if link.present is not None},
            capacities={c.name or "": n for c, n in analysis.probe.capacities.items()},
            single_token=analysis.probe.single_token or (requantised and analysis.probe.has_past),
            replaced=_nudged_vectors(load(Source(file))) if nudged else None,
        )


def _nudged_vectors(model: ir.Model) -> dict[str, Array]:
    """The vectors of a model's most frequent length (weights of norms, biases), each element moved to a neighbour.

    Any other order of additions in a layer changes as much: what this does to the logits, rounding may do.
    """
    vectors: dict[int, dict[str, Array]] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.shape.rank() == 1 and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            vectors.setdefault(tensor.size, {})[name] = tensor.numpy()
    chosen = max(vectors.values(), key=len, default={})
    rng = np.random.default_rng(17)
    return {
        name: np.nextafter(a, np.where(rng.random(a.shape) < 0.5, a.dtype.type(-np.inf), a.dtype.type(np.inf)))
        for name, a in chosen.items()
    }


@contextmanager
def _runnable(source: Source, scratch: Path, *, requantize: bool) -> Iterator[Path]:
    model = load(source)
    changed = upcast_bfloat16(model)
    if not (requantise(model) if requantize else changed):
        yield source.file
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".float32-") as folder:
        save_with_data(model, Path(folder) / "model.onnx")
        yield Path(folder) / "model.onnx"
