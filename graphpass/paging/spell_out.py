"""Spells pages that a graph addresses itself as a contiguous cache, which recognition reads.

A pool is a float input that new keys or values are scattered into, at slots that inputs give or that are computed from
a table of pages; the context of a sequence is gathered from the updated pool through the table. By running this with
numbered rows and shuffled tables it is proven that the context holds exactly the sequence's rows in order; then it is
replaced by a Concat of a past input and the new rows. What the pool's own inputs were for is kept for verification,
which runs the untouched source through them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import NotConvertible
from ..rewrite.builder import Builder
from .interface import META_KEY, PagedInterface, Pool
from .pools import Write, find_writes
from .probe import PageProbe, Roles
from .proof import Context, prove
from .structure import PageStructure, find_structure

__all__ = ["spell_out_pages"]


#: The most read inputs whose meaning only the mask shows: the model is analysed under each of their meanings.
_MOST_UNDECIDED = 2


@dataclass(frozen=True)
class _Paged:
    """One pool with its proven context."""

    write: Write
    context: Context
    present: ir.Value


def spell_out_pages(model: ir.Model) -> None:
    """Replaces every pool of pages by a contiguous cache, in place.

    Raises NotConvertible when a pool is written or read in a way that is not proven to be that of pages.
    """
    writes = find_writes(model.graph)
    if not writes:
        return
    _refuse_other_states(model.graph, writes)
    probe = PageProbe(model, writes)
    found: list[_Paged] = []
    for write in writes:
        found.append(_explain(probe, write, found[-1].context.roles if found else None))
    pages = {p.context.page for p in found}
    if len(pages) != 1:
        raise NotConvertible(f"pools with pages of different lengths {sorted(pages)}", kind="pages")
    structure = find_structure(probe, [p.context for p in found])
    interface = _interface(probe, found, pages.pop())
    _rewrite(model, probe, found, structure)
    model.graph.meta[META_KEY] = interface


def _interface(probe: PageProbe, found: list[_Paged], page: int) -> PagedInterface:
    """What the model's inputs mean. Raises NotConvertible when layers disagree, or too little shows it."""
    roles = dict(found[0].context.roles)
    for paged in found:
        if any(roles.get(name, role) != role for name, role in paged.context.roles.items()):
            raise NotConvertible(
                "an input addresses the pools of different layers in different ways",
                paged.write.node.name or "",
                kind="pages",
            )
        roles.update(paged.context.roles)
    roles.update({value: "total" for value in probe.integers if not value.uses()})  # whatever they are fed
    undecided = [value for value in probe.integers if value not in roles]
    if len(undecided) > _MOST_UNDECIDED:
        raise NotConvertible(
            f"no page shows what these inputs mean: {', '.join(v.name or '' for v in undecided)}",
            next(user.name or "" for user, _ in undecided[0].uses()),
            f"beside tables and slots, up to {_MOST_UNDECIDED} inputs may count tokens",
            kind="pages",
        )
    return PagedInterface(
        page=page,
        pools=tuple(_pool(p) for p in found),
        roles={value.name or "": role for value, role in roles.items()},
        undecided=tuple(value.name or "" for value in undecided),
    )


def _refuse_other_states(graph: ir.Graph, writes: list[Write]) -> None:
    pools = {w.pool for w in writes}
    for value in graph.inputs:
        if value not in pools and value.dtype is not None and value.dtype.is_floating_point() and value.uses():
            raise NotConvertible(
                f"input '{value.name}' is no pool that rows are written into as it is, beside {len(pools)} that are",
                next(user.name or "" for user, _ in value.uses()),
                "export all layers with pools, and change a pool by nothing but the new rows",
                kind="pages",
            )


def _pool(paged: _Paged) -> Pool:
    context = paged.context
    return Pool(
        source=paged.write.pool.name or "",
        present=paged.present.name or "",
        shape=context.pool_shape,
        positions=context.positions,
        dtype=context.dtype,
        axes=context.axes,
    )


def _explain(probe: PageProbe, write: Write, likely: Roles | None) -> _Paged:
    name = write.node.name or ""
    reads = probe.reads(write)
    if len(reads) != 1:
        raise NotConvertible(
            f"the pool '{write.pool.name}' is written once and read {len(reads)} times",
            name,
            "pools are read by one Gather over a table of pages",
            kind="pages",
        )
    present = probe.present(write)
    if present is None:
        raise NotConvertible(
            f"the pool '{write.pool.name}' is written but no output hands it on",
            name,
            "export with the updated pools as outputs",
            kind="pages",
        )
    context = prove(probe, write, reads[0], likely)
    if context is None:
        raise NotConvertible(
            f"what is read from the pool '{write.pool.name}' is not the sequence's rows in order",
            reads[0].node.name or name,
            "row j of a context must be what was written for position j, in page table[j // page] at j % page, with "
            "tables of [entries] or [1, entries] for one sequence",
            kind="pages",
        )
    return _Paged(write, context, present)


def _rewrite(model: ir.Model, probe: PageProbe, found: list[_Paged], structure: PageStructure) -> None:
    graph = model.graph
    builder = Builder(graph, "pages")
    pasts: dict[ir.Value, ir.Value] = {}
    joined: dict[ir.Value, tuple[str | None, ir.Value]] = {}
    for paged in found:
        past, present = _join(builder, paged)
        pasts[paged.write.pool] = past
        joined[paged.present] = (paged.present.name, present)
    graph.outputs[:] = [joined[v][1] if v in joined else v for v in graph.outputs]
    for paged in found:
        paged.context.value.replace_all_uses_with(joined[paged.present][1])
    first = found[0].context
    past = pasts[found[0].write.pool]
    count = builder.node("Gather", [builder.node("Shape", [past])[0], builder.constant(np.array(first.axis, np.int64))])
    new = builder.node("Gather", [builder.node("Shape", [probe.tokens])[0], builder.constant(np.array(-1, np.int64))])
    total = builder.node("Add", [count[0], new[0]], stem="context_length")[0]
    for value, array in structure.constants.items():
        value.replace_all_uses_with(builder.constant(array))
    for value, (rank, kind) in structure.lengths.items():
        length = total if kind == np.int64 else builder.cast(total, ir.DataType.from_numpy(kind))
        value.replace_all_uses_with(builder.reshape(length, [1] * rank))
    for old, (name, value) in joined.items():
        old.name, value.name = f"{name}/replaced", name
    common.TopologicalSortPass()(model)
    common.RemoveUnusedNodesPass()(model)
    for pool in pasts:
        if pool.uses():
            raise NotConvertible(
                f"the pool '{pool.name}' is read by something else than a gathered context",
                next(user.name or "" for user, _ in pool.uses()),
                "pools can only be written at slots and read through a table",
                kind="pages",
            )
    inputs = [pasts.get(v, v) for v in graph.inputs]
    for pool, past in pasts.items():
        past.name, pool.name = pool.name, f"{pool.name}/replaced"
    graph.inputs[:] = inputs


def _join(builder: Builder, paged: _Paged) -> tuple[ir.Value, ir.Value]:
    """A past input and past and new rows, in the place of the context."""
    context = paged.context
    kind = ir.DataType.from_numpy(context.dtype)
    past = ir.Value(
        name=builder.name("past"),
        shape=ir.Shape(["past_positions" if d is None else d for d in context.axes]),
        type=ir.TensorType(kind),
    )
    new = paged.write.updates
    tokens, rank = context.update_shape.index(None), len(context.update_shape)
    if any(d != 1 for d in context.update_shape[:tokens]):
        new = builder.transpose(new, [tokens, *(a for a in range(rank) if a != tokens)])
    rest = [d for d in context.axes if d is not None]
    new = builder.reshape(new, [-1, *rest])
    if context.axis:
        new = builder.transpose(new, [*range(1, context.axis + 1), 0, *range(context.axis + 1, len(context.axes))])
    present = builder.node("Concat", [past, new], {"axis": context.axis}, stem="context")[0]
    present.type = ir.TensorType(kind)
    present.shape = ir.Shape(["context_positions" if d is None else d for d in context.axes])
    return past, present
