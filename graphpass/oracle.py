"""The source model as an oracle: what onnxruntime runs to say what is right."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .normalise import Source, load
from .output import save_with_data
from .packed import SourceModel
from .passes import Analysis
from .upcast import upcast_bfloat16

__all__ = ["source_model"]


@contextmanager
def source_model(source: Source, analysis: Analysis, scratch: Path) -> Iterator[SourceModel]:
    """The source in onnxruntime, with its caches wired up; a bfloat16 one in float32, as the conversion is.

    A float32 copy lies in `scratch` until the block ends.
    """
    links = [link for site in analysis.sites for link in (*site.key_cache, *site.value_cache)]
    with _runnable(source, scratch) as file:
        yield SourceModel(
            file,
            {c.name or "": analysis.probe.cache_shape(c) for c in analysis.interface.caches},
            {link.past.name or "": link.present.name or "" for link in links if link.present is not None},
            capacities={c.name or "": n for c, n in analysis.probe.capacities.items()},
            single_token=analysis.probe.single_token,
        )


@contextmanager
def _runnable(source: Source, scratch: Path) -> Iterator[Path]:
    model = load(source)
    if not upcast_bfloat16(model):
        yield source.file
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".float32-") as folder:
        save_with_data(model, Path(folder) / "model.onnx")
        yield Path(folder) / "model.onnx"
