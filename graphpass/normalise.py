"""Reads a source model without pulling its weights into memory, and brings it into the form that recognition reads.

Normalised: functions inlined, Constant nodes turned into initializers, identities gone, If on a constant condition
replaced by its branch, inputs that only choose a branch fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from .decompose import decompose_attention
from .decompose_microsoft import decompose_microsoft_attention
from .einsum import spell_out_einsum
from .errors import SourceError
from .external_data import is_below, load_graph
from .paging.spell_out import spell_out_pages
from .requantise import requantise
from .upcast import upcast_bfloat16

__all__ = ["Source", "find_model", "load", "normalise"]


@dataclass(frozen=True)
class Source:
    """Where a model came from: its .onnx file and the folder that holds it."""

    file: Path

    @property
    def folder(self) -> Path:
        """The folder of the file, where config, tokenizer and data files lie."""
        return self.file.parent


def find_model(source: Path) -> Source:
    """The .onnx file of a source folder (or the file itself). Raises SourceError when there is none or no choice."""
    if source.is_file():
        return Source(source)
    if not source.is_dir():
        raise SourceError(f"{source} does not exist; give a folder with an exported model, or its .onnx file")
    files = sorted(source.glob("*.onnx")) or sorted(source.glob("onnx/*.onnx"))
    if not files:
        raise SourceError(f"{source} holds no .onnx file; give the folder of an exported model, or its .onnx file")
    if len(files) > 1:
        preferred = [f for f in files if f.name in ("model.onnx", "decoder_model_merged.onnx")]
        if len(preferred) != 1:
            names = ", ".join(f.name for f in files)
            raise SourceError(f"{source} holds several models ({names}); name the .onnx file to convert")
        files = preferred
    return Source(files[0])


def load(source: Source) -> ir.Model:
    """Loads the graph; external data stays on disk. Raises SourceError for what is not a complete ONNX model."""
    try:
        model = load_graph(source.file)
    except Exception as error:  # protobuf and onnx_ir raise their own exceptions for damaged files
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise SourceError(f"{source.file} is not a readable ONNX model ({reason}); export the model again") from None
    if model.graph.num_nodes() == 0:
        raise SourceError(f"{source.file} is not an ONNX model or has no nodes; export the model again")
    for path, needed in _data_files(model).items():
        if not is_below(path, source.file.parent):
            raise SourceError(
                f"{source.file} names the data file {path}, which lies outside its folder; put it beside the model"
            )
        if not path.is_file():
            raise SourceError(
                f"{source.file} needs the external data file {path.name}, which is missing from {path.parent}; "
                "put it beside the model"
            )
        if path.stat().st_size < needed:
            raise SourceError(
                f"{path} has {path.stat().st_size} bytes, the model needs {needed}; it is incomplete: copy it again"
            )
    return model


def _data_files(model: ir.Model) -> dict[Path, int]:
    needed: dict[Path, int] = {}
    for tensor in external_tensors(model):
        path = Path(tensor.path)
        needed[path] = max(needed.get(path, 0), (tensor.offset or 0) + (tensor.length or 0))
    return needed


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Initializers whose data lies in files beside the model."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value


def normalise(model: ir.Model, *, requantize: bool = False) -> None:
    """Brings a model into the normal form, in place; bfloat16 becomes float32.

    With `requantize`, activations that are quantised per tensor at run time are quantised per token instead.
    """
    upcast_bfloat16(model)
    _fix_branch_inputs(model)
    if model.functions:
        # A function that stands in for one of onnxruntime's own ops stays: the op is faster than its body.
        known = onnxruntime_ops()
        common.InlinePass(lambda function: (function.domain, function.name) not in known)(model)
        for key in [k for k, f in model.functions.items() if (f.domain, f.name) in known]:
            del model.functions[key]
    if any(node.op_type == "If" for node in model.graph):
        _fold_branches(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveInitializersFromInputsPass()(model)
    _drop_sole_concats(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    if not all(node.name for node in model.graph):
        _name_nodes(model)
    if requantize:
        requantise(model)
    decompose_attention(model)
    decompose_microsoft_attention(model)
    spell_out_einsum(model)
    common.TopologicalSortPass()(model)
    spell_out_pages(model)


@cache
def onnxruntime_ops() -> frozenset[tuple[str, str]]:
    """(domain, name) of every op that the installed onnxruntime has a schema for."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return frozenset((schema.domain, schema.name) for schema in get_all_operator_schema())


def _fix_branch_inputs(model: ir.Model) -> None:
    """Makes a boolean scalar input that selects an If branch a constant: true is the branch that reads the past."""
    for value in list(model.graph.inputs):
        if value.dtype == ir.DataType.BOOL and any(user.op_type == "If" for user, _ in value.uses()):
            fixed = ir.Value(name=f"{value.name}/fixed", const_value=ir.tensor(np.array([True]), name="fixed"))
            fixed.const_value = ir.tensor(np.array([True]), name=fixed.name)
            fixed.dtype = ir.DataType.BOOL
            model.graph.register_initializer(fixed)
            value.replace_all_uses_with(fixed)
            model.graph.inputs.remove(value)


def _fold_branches(model: ir.Model) -> None:
    from onnxscript import optimizer

    optimizer.optimize(model, input_size_limit=1024, output_size_limit=1024)


def _drop_sole_concats(model: ir.Model) -> None:
    """A Concat of one value is that value."""
    for node in model.graph:
        if node.op_type == "Concat" and len(node.inputs) == 1 and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(node.inputs[0])  # type: ignore[arg-type]


def _name_nodes(model: ir.Model) -> None:
    for index, node in enumerate(model.graph):
        if not node.name:
            node.name = f"{node.op_type}_{index}"
