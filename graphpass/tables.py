"""What `convert` and `inspect` print of models: one line for all layers that are alike, one row for a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from .report import LayerReport

__all__ = ["layer_lines", "model_table"]


def layer_lines(layers: Sequence[LayerReport]) -> list[str]:
    """A line for each kind of layer; which ones, and the name of the first, only where there are several kinds."""
    kinds: dict[str, list[LayerReport]] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer), []).append(layer)
    if len(kinds) == 1:
        return [f"{len(layers)} layer{'s' if len(layers) > 1 else ''}: {kind}" for kind in kinds]
    return [_of_several(kind, members) for kind, members in kinds.items()]


def _of_several(kind: str, members: Sequence[LayerReport]) -> str:
    name = f"'{members[0].node}'"
    if len(members) == 1:
        return f"layer {members[0].layer}: {kind}; {name}"
    return f"layers {_ranges(m.layer for m in members)}: {kind}; first {name}"


def _kind(layer: LayerReport) -> str:
    sizes = dict.fromkeys((layer.key_head_size, layer.value_head_size))
    words = [
        layer.form,
        f"{layer.heads} heads on {layer.kv_heads} of size {'/'.join(map(str, sizes))}",
        layer.mask,
        *layer.fused,
        *([f"softcap {layer.softcap:g}"] if layer.softcap else []),
        *(["sinks"] if layer.sinks else []),
        *(["latent cache"] if layer.latent else []),
    ]
    return ", ".join(words)


def _ranges(numbers: Iterable[int]) -> str:
    """`0-4, 6` of 0, 1, 2, 3, 4, 6, which ascend."""
    found = list(numbers)
    starts = [found[0], *(b for a, b in pairwise(found) if b != a + 1)]
    ends = [*(a for a, b in pairwise(found) if b != a + 1), found[-1]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def model_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each report of `inspect`, as dictionaries with the model's name."""
    table = Table(title=f"{sum(r['convertible'] for r in results)} of {len(results)} can be converted")
    for column in ("model", "convertible", "layers", "what it is, or why not"):
        table.add_column(column, overflow="fold")
    for result in results:
        if result["convertible"]:
            masks = dict.fromkeys(layer["mask"] for layer in result["layers"])
            table.add_row(result["model"], "yes", str(len(result["layers"])), ", ".join(masks))
        else:
            refusal = result["refusal"]
            place = f" (node '{refusal['node']}')" if refusal["node"] else ""
            hint = f"; {refusal['hint']}" if refusal["hint"] else ""
            table.add_row(result["model"], "no", "-", f"{refusal['reason']}{place}{hint}")
    return table
