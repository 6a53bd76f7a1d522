"""What a conversion found and did, for people and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from .errors import NotConvertible
from .passes import Analysis
from .recognise.site import AttentionSite
from .rewrite.shared import cache_owners

__all__ = ["LayerReport", "Refusal", "Report", "describe"]


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One attention: where it was, what form it had, what it computes, what became of it."""

    layer: int
    node: str
    form: str
    heads: int
    kv_heads: int
    key_head_size: int
    value_head_size: int
    mask: str
    window: int | None
    scale: float
    softcap: float
    sinks: bool
    alibi_slopes: tuple[float, ...]
    fused: tuple[str, ...]
    caches: tuple[str, ...]
    nodes_dropped: int
    latent: bool = False


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a model is not converted."""

    kind: str
    reason: str
    node: str
    hint: str

    @classmethod
    def of(cls, error: NotConvertible) -> Refusal:
        """From the error that `convert` would raise."""
        return cls(kind=error.kind, reason=error.reason, node=error.node, hint=error.hint)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `convert` or `inspect`. `refusal` None means convertible."""

    source: str
    layers: tuple[LayerReport, ...] = ()
    nodes_before: int = 0
    nodes_after: int | None = None
    kv_bytes_per_token: int = 0
    windows: tuple[int | None, ...] = ()
    compute_dtype: str = ""
    max_positions: int | None = None
    inputs_before: tuple[str, ...] = ()
    inputs_after: tuple[str, ...] = ()
    verification: Mapping[str, Any] = field(default_factory=dict)
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()

    @property
    def convertible(self) -> bool:
        """True when nothing stands against a conversion."""
        return self.refusal is None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "convertible": self.convertible}


def describe(source: str, analysis: Analysis, *, nodes_before: int) -> Report:
    """The report of an analysed model."""
    layers = tuple(_layer(i, site) for i, site in enumerate(analysis.sites))
    width = np.dtype(analysis.compute_dtype.numpy()).itemsize
    owners = cache_owners(analysis.sites)
    owning = [layer for layer in layers if owners[layer.layer] == layer.layer]
    per_token = sum(x.kv_heads * (x.key_head_size + (0 if x.latent else x.value_head_size)) * width for x in owning)
    return Report(
        source=source,
        layers=layers,
        nodes_before=nodes_before,
        kv_bytes_per_token=per_token,
        windows=tuple(group.window for group in analysis.groups),
        compute_dtype=str(analysis.compute_dtype.numpy()),
        max_positions=analysis.max_positions,
        inputs_before=analysis.input_names,
        notes=_notes(analysis),
    )


def _notes(analysis: Analysis) -> tuple[str, ...]:
    """What somebody who relies on the conversion should know."""
    notes: list[str] = []
    if analysis.context_unstated and analysis.max_positions is not None:
        notes.append(
            f"nothing states the longest context: contexts up to {analysis.max_positions} tokens were provided for "
            "(--max-positions changes that)"
        )
    if any(isinstance(v.const_value, ir.LazyTensor) for v in analysis.probe.view.graph.initializers.values()):
        notes.append("bfloat16 weights are computed in float32: onnxruntime has no bfloat16 kernels for CPU")
    if analysis.probe.single_token:
        notes.append("the source takes one new token a step; the converted model takes any number")
    if analysis.requantised:
        notes.append(
            f"{analysis.requantised} activations are quantised per token, which the source quantises per tensor"
        )
    owners = cache_owners(analysis.sites)
    readers = [i for i, owner in enumerate(owners) if owner != i]
    if readers:
        notes.append(f"{len(readers)} layers read another layer's cache and have none of their own")
    return tuple(notes)


def _layer(index: int, site: AttentionSite) -> LayerReport:
    fused = [
        name
        for name, found in (
            ("rotary", site.rotary is not None),
            ("q norm", site.q_norm is not None),
            ("k norm", site.k_norm is not None),
            ("packed QKV", site.packed),
        )
        if found
    ]
    return LayerReport(
        layer=index,
        node=site.node.name or "",
        form=site.form,
        heads=site.heads,
        kv_heads=site.kv_heads,
        key_head_size=site.key.size,
        value_head_size=site.value.size,
        mask=site.score.kind,
        window=site.score.window,
        scale=site.score.scale * site.query.scale * site.key.scale,
        softcap=site.score.softcap,
        sinks=bool(site.score.sinks),
        alibi_slopes=site.score.slopes,
        fused=tuple(fused),
        caches=tuple(dict.fromkeys(link.past.name or "" for link in (*site.key_cache, *site.value_cache))),
        nodes_dropped=len(site.dropped),
        latent=site.latent,
    )
