"""What other targets than pagegraft's own CPU runtime demand of a converted model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from pagegraft.custom_ops import spec
from pagegraft.custom_ops.ascend.backend import MAX_ALIBI_HEADS, AscendEmulatorBackend

from ..errors import NotConvertible
from ..recognise.site import AttentionSite
from .builder import Builder
from .insert_op import PagedInputs, attributes_of
from .padding import padded
from .shared import cache_owners

if TYPE_CHECKING:
    from ..analysis import Analysis
    from ..options import Target

__all__ = ["check_target", "head_multiple", "positions_from_lengths", "target_notes"]


def check_target(analysis: Analysis, target: Target) -> None:
    """Raises NotConvertible when the target's kernel cannot compute one of the attentions."""
    if target == "ort-cuda":
        _check_microsoft_contract(analysis)
    elif target == "ascend":
        _check_ascend(analysis)


def _check_microsoft_contract(analysis: Analysis) -> None:
    """onnxruntime's CUDA kernel knows `com.microsoft::PagedAttention` only."""
    kind = str(analysis.compute_dtype.numpy())
    if kind not in ("float16", "bfloat16"):
        raise NotConvertible(
            f"onnxruntime's CUDA kernel has no {kind} paged attention",
            hint="export the model in float16",
            kind="target",
        )
    if cache_owners(analysis.sites) != list(range(len(analysis.sites))):
        raise NotConvertible("layers share caches, which needs a slot mapping", hint="use --target cpu", kind="target")
    for site in analysis.sites:
        if spec.needs_pagegraft_domain(
            attributes_of(site), compute_dtype=kind, head_size=site.key.size, value_head_size=site.value.size
        ):
            what = "ALiBi slopes" if site.score.slopes else "key and value heads of different size"
            raise NotConvertible(
                f"onnxruntime's paged attention has no {what}", site.node.name or "", "use --target cpu", kind="target"
            )
        if site.key.size % 8:
            raise NotConvertible(
                f"onnxruntime's CUDA kernel needs head sizes that are multiples of 8, not {site.key.size}",
                site.node.name or "",
                "use --target cpu",
                kind="target",
            )


def _check_ascend(analysis: Analysis) -> None:
    """What the Ascend kernel takes is what its backend declares."""
    can = AscendEmulatorBackend().capabilities()
    kind = str(analysis.compute_dtype.numpy())
    if kind not in can.compute_dtypes:
        raise NotConvertible(
            f"the Ascend kernel has no {kind} paged attention",
            hint="export the model in float16",
            kind="target",
        )
    for site in analysis.sites:
        if site.rotary is not None or site.q_norm is not None:
            raise NotConvertible(
                "the Ascend kernel has no rotary embedding or q/k norm, and this model has them in its attention node",
                site.node.name or "",
                "export the model without fused attention, or use --target cpu",
                kind="target",
            )
        wrong = _beyond_ascend(site, can.max_head_size)
        if wrong:
            raise NotConvertible(
                f"the Ascend kernel has {wrong}", site.node.name or "", "use --target cpu", kind="target"
            )


def _beyond_ascend(site: AttentionSite, largest: int) -> str:
    """What the kernel has less of than the site asks for; head sizes below the limit are padded."""
    size = max(site.key.size, site.value.size)
    if site.latent:
        return "no caches of latent vectors"
    if size > largest:
        return f"head sizes up to {largest}, not {size}"
    if site.score.slopes and site.heads > MAX_ALIBI_HEADS:
        return f"ALiBi slopes for up to {MAX_ALIBI_HEADS} heads, not {site.heads}"
    return ""


def head_multiple(target: Target) -> int:
    """Heads are padded to a multiple of this many channels."""
    return AscendEmulatorBackend().capabilities().head_size_multiple if target == "ascend" else 1


def target_notes(analysis: Analysis, target: Target) -> tuple[str, ...]:
    """What the target changed, for the report."""
    multiple = head_multiple(target)
    sizes = sorted({o.size for site in analysis.sites for o in (site.key, site.value)})
    widened = [f"{size} to {padded(size, multiple)}" for size in sizes if size % multiple]
    return (f"heads are padded for {target}: {', '.join(widened)} channels",) if widened else ()


def positions_from_lengths(builder: Builder, tokens: ir.Value, shared: PagedInputs) -> ir.Value:
    """Positions `[T]` of packed tokens, computed in the graph from cumulative and past lengths."""
    zero, one = (builder.constant(np.array(n, np.int64)) for n in (0, 1))
    cumulative = builder.cast(shared.cumulative, ir.DataType.INT64)
    past = builder.cast(shared.past, ir.DataType.INT64)
    count = builder.node("Gather", [builder.node("Shape", [tokens])[0], zero])[0]
    place_T = builder.node("Range", [zero, count, one], stem="place")[0]
    bounds = (builder.constant(np.array([n], np.int64)) for n in (1, 1 << 40, 0))
    ends_S1 = builder.reshape(builder.node("Slice", [cumulative, *bounds])[0], [-1, 1])
    over_ST = builder.cast(builder.node("LessOrEqual", [ends_S1, place_T])[0], ir.DataType.INT64)
    ones = builder.node(
        "ConstantOfShape", [builder.node("Shape", [shared.past])[0]], {"value": ir.tensor(np.ones(1, np.int64))}
    )[0]
    sequence_T = builder.node("MatMul", [ones, over_ST], stem="sequence")[0]  # how many sequences end before a token
    start_T = builder.node("Gather", [cumulative, sequence_T])[0]
    offset_T = builder.node("Gather", [past, sequence_T])[0]
    inside_T = builder.node("Sub", [place_T, start_T])[0]
    return builder.node("Add", [inside_T, offset_T], stem="positions")[0]
