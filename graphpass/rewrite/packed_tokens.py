"""Turns the interface of a graph into packed tokens: one row `[1, T]` inside, flat inputs outside."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..io_contract import SourceInterface
from ..recognise.probe import Probe
from ..recognise.structure import StructurePlan
from .builder import Builder

__all__ = ["PackedTokens", "pack_tokens"]


def graph_input(name: str, dtype: ir.DataType, *dims: str | int) -> ir.Value:
    """A new graph input (not yet part of a graph)."""
    return ir.Value(name=name, shape=ir.Shape(list(dims)), type=ir.TensorType(dtype))


class PackedTokens:
    """Replaces the token-side inputs of a source graph."""

    def __init__(
        self, builder: Builder, interface: SourceInterface, input_ids: ir.Value, position_ids: ir.Value
    ) -> None:
        self.builder = builder
        self.interface = interface
        self.input_ids = input_ids
        self.position_ids = position_ids

    def replace_inputs(self) -> None:
        """Feeds the old token and position inputs from the new flat ones; fixes the mask and the other inputs."""
        tokens = self.interface.tokens
        row = self._row(self.input_ids, tokens)
        if self.interface.mask is not None:
            self._replace(self.interface.mask, self._ones_like(row, self.interface.mask))
        self._replace(tokens, row)
        if self.interface.positions is not None:
            self._replace(self.interface.positions, self._row(self.position_ids, self.interface.positions))
        for scalar in self.interface.scalars:
            dims = [d if isinstance(d, int) else 1 for d in (scalar.shape or ())]
            kind = (scalar.dtype or ir.DataType.INT64).numpy()
            self._replace(scalar, self.builder.constant(np.zeros(dims, kind)))
        for value, role in self.interface.paged.items():
            self._replace(value, self._paged(value, role, row))

    def replace_positions(self, probe: Probe, plan: StructurePlan) -> None:
        """Puts the position input plus a constant in the place of each value that equals it."""
        for value, offset in plan.positions.items():
            array = [probe.structural([value], tokens, 0)[0] for tokens in (2, 3)]
            dims = [-1 if a != b else a for a, b in zip(array[0].shape, array[1].shape, strict=True)]
            source = self.position_ids
            if offset:
                source = self.builder.node("Add", [source, self.builder.constant(np.array([offset], np.int64))])[0]
            kind = ir.DataType.from_numpy(array[0].dtype)
            if kind != ir.DataType.INT64:
                source = self.builder.cast(source, kind)
            if dims != [-1]:
                source = self.builder.reshape(source, dims, "positions")
            self._replace(value, source)

    def _row(self, flat: ir.Value, like: ir.Value) -> ir.Value:
        rank = len(like.shape or (1, 1))
        value = self.builder.reshape(flat, [1] * (rank - 1) + [-1], f"{flat.name}_row")
        if like.dtype not in (None, flat.dtype):
            value = self.builder.cast(value, like.dtype)
        return value

    def _paged(self, value: ir.Value, role: str, row: ir.Value) -> ir.Value:
        """What an input for pages is without a past: the packed tokens are one sequence to what is left of its readers.
        Tables and slots have no readers left."""
        rank, kind = len(value.shape or ()), value.dtype or ir.DataType.INT64
        if role == "positions":
            return self._row(self.position_ids, value)
        if role not in ("total", "new", "last"):
            return self.builder.constant(np.zeros([1] * rank, kind.numpy()))
        count = self.builder.node("Size", [row])[0]
        if role == "last":
            count = self.builder.node("Sub", [count, self.builder.constant(np.array(1, np.int64))])[0]
        return self.builder.reshape(self.builder.cast(count, kind), [1] * rank)

    def _ones_like(self, row: ir.Value, mask: ir.Value) -> ir.Value:
        shape = self.builder.node("Shape", [row], stem="mask_shape")[0]
        kind = (mask.dtype or ir.DataType.INT64).numpy()
        fill = ir.tensor(np.ones(1, kind))
        return self.builder.node("ConstantOfShape", [shape], {"value": fill}, stem="mask")[0]

    @staticmethod
    def _replace(old: ir.Value, new: ir.Value) -> None:
        for user, position in list(old.uses()):
            if new.producer() is not user:
                user.replace_input_with(position, new)


def pack_tokens(
    builder: Builder, probe: Probe, plan: StructurePlan, input_ids: ir.Value, position_ids: ir.Value
) -> None:
    """Does both replacements; positions by value first, while the source's values are still wired up."""
    packed = PackedTokens(builder, probe.interface, input_ids, position_ids)
    packed.replace_positions(probe, plan)
    packed.replace_inputs()
