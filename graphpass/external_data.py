"""Loads graphs whose data files are links.

Hard links, as `convert --link` makes them, and symbolic ones, as the caches of model hubs hold them. onnx_ir reads
neither (more than one hard link, or a link that leaves the model's folder), since whoever can write into that folder
could link a secret there. Here a user names a model on their own disk, and onnxruntime reads it too. What a model
*file* can say is still checked: its data lies below its folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

__all__ = ["is_below", "load_graph"]


class _SharedTensor(ir.ExternalTensor):
    """External data in a linked file below the model's folder."""

    __slots__ = ()

    def _check_path_containment(self) -> None:
        """Done by `load_graph`."""


def load_graph(file: Path) -> ir.Model:
    """As `onnx_ir.load`: external data stays on disk and is read when it is asked for."""
    model = ir.load(file)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if type(tensor) is ir.ExternalTensor and _is_linked(Path(tensor.path), file.parent):
            value.const_value = _SharedTensor(
                tensor.location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
                base_dir=tensor.base_dir,
            )
    return model


def is_below(path: Path, folder: Path) -> bool:
    """By name, without following links."""
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _is_linked(path: Path, folder: Path) -> bool:
    return is_below(path, folder) and path.is_file() and (path.is_symlink() or path.stat().st_nlink > 1)
