"""A source model in onnxruntime as both kinds of oracle run it: its own failures are said to be its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .errors import SourceFailure
from .evaluate import Array, first_line, session_options

__all__ = ["SourceSession", "numpy_type"]


class SourceSession:
    """`inputs` by name, and the name of the output that holds the `logits`."""

    def __init__(self, model: Path, *, replaced: Mapping[str, Array] | None = None) -> None:
        """`replaced`: initialisers by name that take the place of the file's.

        Raises SourceFailure when onnxruntime cannot load it.
        """
        options = session_options(optimise=True)
        self._replaced = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in (replaced or {}).items()}  # kept alive
        for name, value in self._replaced.items():
            options.add_initializer(name, value)
        try:
            self._session = ort.InferenceSession(str(model), options)
        except Exception as error:  # onnxruntime raises untyped exceptions
            raise SourceFailure(f"the source does not load in onnxruntime: {first_line(error)}") from None
        self.inputs = {i.name: i for i in self._session.get_inputs()}
        outputs = [o.name for o in self._session.get_outputs()]
        self.logits = "logits" if "logits" in outputs else outputs[0]

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array], *, new: int, past: int) -> list[Array]:
        """One step of `new` tokens behind `past`. Raises SourceFailure when the source itself fails."""
        try:
            return list(self._session.run(list(outputs), dict(feeds)))
        except Exception as error:  # onnxruntime raises untyped exceptions
            raise SourceFailure(f"the source itself fails on {new} tokens after {past}: {first_line(error)}") from None


def numpy_type(name: str) -> np.dtype[Any]:
    """Of a type as onnxruntime names it, `tensor(float)` for instance."""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(inner, inner))
