"""Finds out whether onnxruntime takes a source model at all, cheaply: what does not run has no right answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from pagegraft.custom_ops.errors import PagegraftError

from .errors import NotConvertible, VerificationError
from .evaluate import first_line, session_options
from .normalise import Source, load
from .oracle import source_model
from .passes import Analysis
from .source_facts import is_small
from .upcast import upcast_bfloat16

__all__ = ["blaming_broken_sources", "check_loads", "check_runs"]

#: Weights with more elements than this are left out: they become inputs.
_LARGEST_WEIGHT = 1 << 10
#: Kinds of refusal that a damaged graph can cause.
_DOUBTFUL = frozenset(
    {"state", "cache", "interface", "no-attention", "broken-source", "layout", "shape", "unsupported"}
)


def check_runs(source: Source, analysis: Analysis) -> None:
    """Raises NotConvertible of kind broken-source when onnxruntime does not load the source, or, for a small one, does
    not run it on three tokens.
    """
    if not is_small(source):
        check_loads(source)
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with source_model(source, analysis, Path(scratch)) as oracle:
                oracle.logits([1, 2, 1][: analysis.max_positions or 3])
        except VerificationError as error:
            raise _broken(str(error)) from None


def check_loads(source: Source) -> None:
    """Raises NotConvertible of kind broken-source when onnxruntime does not load the source's graph.

    The weights are not read: those with many elements are made inputs of the graph.
    """
    model = load(source)
    upcast_bfloat16(model)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.size > _LARGEST_WEIGHT:
            del model.graph.initializers[name]
            if not value.is_graph_input():
                model.graph.inputs.append(value)
            value.const_value = None
            value.shape, value.type = tensor.shape, ir.TensorType(tensor.dtype)  # type: ignore[assignment]
        elif isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=name)
    try:
        content = ir.serde.serialize_model(model).SerializeToString()
        ort.InferenceSession(content, session_options())
    except Exception as error:  # onnxruntime raises untyped exceptions
        raise _broken(f"the source does not load in onnxruntime: {first_line(error)}") from None


def _broken(reason: str) -> NotConvertible:
    hint = "export the model again (convert --no-verify does without the source's own results)"
    return NotConvertible(reason, hint=hint, kind="broken-source")


@contextmanager
def blaming_broken_sources(source: Source) -> Iterator[None]:
    """Lets a refusal pass, but says that the source does not load when that explains it.

    It also explains any other error: nodes without the attributes or inputs that they must have.
    """
    try:
        yield
    except NotConvertible as error:
        if error.kind in _DOUBTFUL:
            check_loads(source)
        raise
    except Exception as error:
        if not isinstance(error, PagegraftError):
            check_loads(source)
        raise
