"""Adds nodes and constants to a graph under names that it does not use yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..evaluate import Array

__all__ = ["Builder"]


class Builder:
    """Appends to a graph; the caller sorts it afterwards. Equal constants are shared."""

    def __init__(self, graph: ir.Graph, prefix: str = "pagegraft") -> None:
        self.graph = graph
        self._prefix = prefix
        self._used = {v.name for n in graph for v in n.outputs} | set(graph.initializers)
        self._used |= {v.name for v in graph.inputs}
        self._by_identity: dict[int, tuple[Array, ir.Value]] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def name(self, stem: str) -> str:
        """A new name that contains `stem`."""
        candidate, count = f"{self._prefix}/{stem}", 0
        while candidate in self._used:
            count += 1
            candidate = f"{self._prefix}/{stem}_{count}"
        self._used.add(candidate)
        return candidate

    def constant(self, array: Array, stem: str = "constant") -> ir.Value:
        """An initializer with the array's data."""
        known = self._by_identity.get(id(array))
        if known is not None:
            return known[1]
        given = array
        array = np.asarray(array, order="C")  # ascontiguousarray would make a scalar one-dimensional
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = self.name(stem)
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.shape = ir.Shape(array.shape)
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.graph.register_initializer(value)
            self._constants[key] = value
        if given.nbytes > 1 << 16:  # large tables come by the same array in every layer
            self._by_identity[id(given)] = (given, self._constants[key])
        return self._constants[key]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: int = 1,
        stem: str = "",
    ) -> list[ir.Value]:
        """A node at the end of the graph; its outputs."""
        label = self.name(stem or op_type)
        node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=outputs, name=label)
        for index, out in enumerate(node.outputs):
            out.name = label if index == 0 else f"{label}:{index}"
        self.graph.append(node)
        return list(node.outputs)

    def reshape(self, value: ir.Value, dims: Sequence[int], stem: str = "") -> ir.Value:
        """`value` in the given shape (-1 for the open axis)."""
        return self.node("Reshape", [value, self.constant(np.array(dims, np.int64), "shape")], stem=stem)[0]

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """`value` with its axes in the given order."""
        return self.node("Transpose", [value], {"perm": list(perm)})[0]

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """`value` as another element type."""
        return self.node("Cast", [value], {"to": int(to)})[0]
