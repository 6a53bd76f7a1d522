"""What the inputs and outputs of a source model mean, and how to feed them for one sequence.

The names that matter are those of the inputs of every decoder export (tokens, mask, positions); caches are found by
what the graph does with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from .errors import NotConvertible
from .paging.interface import PagedInterface

__all__ = ["SourceInterface", "classify", "reader"]


@dataclass(frozen=True)
class SourceInterface:
    """Roles of a source model's inputs and outputs.

    `scalars` are small integer inputs that the graph hardly uses (a window size carried in the cache object). `paged`
    are inputs by which the source found its pages, with their roles.
    """

    tokens: ir.Value
    mask: ir.Value | None
    positions: ir.Value | None
    caches: tuple[ir.Value, ...]
    scalars: tuple[ir.Value, ...]
    logits: ir.Value
    presents: tuple[ir.Value, ...] = field(default=())
    paged: Mapping[ir.Value, str] = field(default_factory=dict)


def classify(graph: ir.Graph, pages: PagedInterface | None = None) -> SourceInterface:
    """Finds the role of every input. Raises NotConvertible for an input that nobody can explain."""
    paged = {} if pages is None else {v: pages.roles[v.name or ""] for v in graph.inputs if v.name in pages.roles}
    pools = set() if pages is None else {pool.source for pool in pages.pools}
    roles: dict[str, list[ir.Value]] = {"tokens": [], "mask": [], "positions": [], "caches": [], "scalars": []}
    for value in graph.inputs:
        if value not in paged:
            roles["caches" if value.name in pools else _role(value)].append(value)
    if not roles["tokens"]:
        raise NotConvertible(
            "the model has no integer token input", hint="export the text decoder with input_ids", kind="interface"
        )
    for role in ("tokens", "mask", "positions"):
        if len(roles[role]) > 1:
            names = ", ".join(v.name or "" for v in roles[role])
            raise NotConvertible(f"several inputs look like {role}: {names}", kind="interface")
    logits = _logits(graph)
    return SourceInterface(
        tokens=roles["tokens"][0],
        mask=_only(roles["mask"]),
        positions=_only(roles["positions"]),
        caches=tuple(roles["caches"]),
        scalars=tuple(roles["scalars"]),
        logits=logits,
        presents=tuple(v for v in graph.outputs if v is not logits),
        paged=paged,
    )


def _only(values: list[ir.Value]) -> ir.Value | None:
    return values[0] if values else None


def reader(value: ir.Value) -> str:
    """The name of the first node that reads a value, or an empty one."""
    return next((node.name or "" for node, _ in value.uses()), "")


def _role(value: ir.Value) -> str:
    rank = None if value.shape is None else len(value.shape)
    integer = value.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    name = value.name or ""
    if integer and rank is not None and rank <= 1 and "position" not in name:
        return "scalars"
    if "encoder" in name:
        raise NotConvertible(
            f"input '{name}' carries the state of an encoder",
            reader(value),
            hint="only decoder-only language models can be converted",
            kind="encoder-decoder",
        )
    if "mask" in name:
        if rank != 2:
            raise NotConvertible(
                f"input '{name}' is a mask of rank {rank}: the caller decides who sees whom",
                reader(value),
                hint="tree and prefix masks cannot be paged; export with a two-dimensional attention_mask",
                kind="mask",
            )
        return "mask"
    if integer and "position" in name:
        return "positions"
    if integer and rank == 2:
        return "tokens"
    if rank is not None and rank >= 3 and value.dtype is not None and value.dtype.is_floating_point():
        return "caches"
    raise NotConvertible(
        f"input '{name}' ({value.dtype}, rank {rank}) has no role in a decoder over tokens",
        reader(value),
        hint="export with input_ids, attention_mask, position_ids and past key/values only",
        kind="interface",
    )


def _logits(graph: ir.Graph) -> ir.Value:
    named = [v for v in graph.outputs if v.name == "logits"]
    if named:
        return named[0]
    first = graph.outputs[0] if graph.outputs else None
    if first is None:
        raise NotConvertible("the model has no outputs", kind="interface")
    return first
