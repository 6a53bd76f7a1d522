"""Applies what evaluation found to be constant, and removes what is dead after attention is gone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..evaluate import Array
from ..recognise.probe import Probe
from ..recognise.structure import StructurePlan
from .builder import Builder

__all__ = ["clean_up", "detach_caches", "fold"]


def fold(builder: Builder, probe: Probe, plan: StructurePlan) -> None:
    """Replaces reads of constant structural values by constants, and shape operands by shapes with -1."""
    for node in list(builder.graph):
        for position, value in enumerate(node.inputs):
            if value is None:
                continue
            if value in plan.constants:
                node.replace_input_with(position, builder.constant(plan.constants[value], "folded"))
            elif node.op_type == "Reshape" and position == 1:
                dims = _open_dims(probe, node.outputs[0])
                if dims is not None:
                    node.replace_input_with(1, builder.constant(np.array(dims, np.int64), "shape"))
                elif value in plan.shapes and not np.any(plan.shapes[value] == 0):
                    node.replace_input_with(1, builder.constant(plan.shapes[value], "shape"))


def _open_dims(probe: Probe, value: ir.Value) -> list[int] | None:
    """A measured shape with -1 at the one axis that grows with the tokens; None when several do or one is empty."""
    affine = probe.affine(value)
    if affine is None:
        return None
    dims = [-1 if per_new else constant for constant, per_new, _ in affine]
    return dims if dims.count(-1) <= 1 and 0 not in dims else None


def drop_identical_expands(builder: Builder, probe: Probe) -> None:
    """Removes Expand nodes whose output has the shape of their input at every length."""
    for node in list(builder.graph):
        if node.op_type != "Expand" or node.inputs[0] is None:
            continue
        before, after = probe.affine(node.inputs[0]), probe.affine(node.outputs[0])
        if before is not None and before == after:
            node.outputs[0].replace_all_uses_with(node.inputs[0])


def detach_caches(builder: Builder, joined: Mapping[ir.Value, ir.Value], caches: Mapping[ir.Value, Array]) -> None:
    """What is left of readers of the source's caches sees new tokens only: `joined` maps each value that was past and
    new tokens to the new ones, `caches` gives an empty stand-in for each cache input."""
    for value, new in joined.items():
        value.replace_all_uses_with(new, replace_graph_outputs=False)
    for cache, empty in caches.items():
        if cache.uses():
            stand_in = builder.constant(empty, "no_past")
            for user, position in list(cache.uses()):
                user.replace_input_with(position, stand_in)


def clean_up(model: ir.Model) -> None:
    """Sorts, and removes dead nodes, unused constants, stale shapes and opset imports."""
    common.TopologicalSortPass()(model)  # dead nodes are found from the last node on
    common.RemoveUnusedNodesPass()(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    for node in model.graph:
        for value in node.outputs:
            if node.op_type != "PagedAttention" and not value.is_graph_output():
                value.shape = None
                value.type = None
