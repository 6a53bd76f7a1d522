"""The source model as an oracle: what onnxruntime runs to say what is right."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    source: Source, analysis: Analysis, scratch: Path, *, longest: int = 1024, as_given: bool = False
) -> Iterator[SourceModel | PagedSourceModel]:
    """The source in onnxruntime, with its caches wired up; a bfloat16 one in float32, as the conversion is.

    A float32 copy lies in `scratch` until the block ends. `longest` is the most tokens of a sequence.
    A source whose activations are quantised per token is given one token at a time, which is what that means; without
    a past it is run rewritten. `as_given`: it is neither.
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
        )


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
