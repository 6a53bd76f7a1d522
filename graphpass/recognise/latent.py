"""Finds values that are the first channels of the keys: such an attention keeps one cache instead of two.

That is how a latent attention is cached when its queries were multiplied into the latent space.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ..evaluate import Array, Unevaluable
from .layout import TOKENS, moved
from .probe import Probe
from .site import AttentionSite, Operand

__all__ = ["as_latent"]


def as_latent(probe: Probe, site: AttentionSite, value: ir.Value, place_HTD: Array) -> AttentionSite:
    """The site with one cache when all heads share one key and the value is a part of it, else the site itself.

    `place_HTD` says where the elements of the site's value lie in `value`.
    """
    if site.kv_heads != 1:
        return site
    parts = site.key.parts or (site.key,)
    for index, part in enumerate(parts):
        found = _channels(probe, part, value, place_HTD)
        if found is None or found[0] != 0:
            continue
        order = [index, *(i for i in range(len(parts)) if i != index)]
        return replace(
            site,
            latent=True,
            form=f"{site.form}, latent",
            query=_ordered(site.query, order),
            key=_ordered(site.key, order),
            value=replace(site.value, value=None, perm=None, scale=found[1]),
        )
    return site


def _channels(probe: Probe, part: Operand, value: ir.Value, place_HTD: Array) -> tuple[int, float] | None:
    """The first channel of a key part that the value takes, and its scale; None when it is taken from elsewhere."""
    if part.value is None:
        return None
    try:
        found = moved(probe, part.value, value)
        shape = probe.shape(part.value, TOKENS, 0)
    except Unevaluable:
        return None
    if found is None or int(np.prod(shape)) != TOKENS * part.size:
        return None
    places = np.arange(TOKENS * part.size).reshape(shape)
    rows = places if part.perm is None else places.transpose(part.perm)
    number = np.argsort(rows.reshape(-1))  # of a place: token * size + channel
    taken_HTD = number[found.index.reshape(-1)[place_HTD]]
    first = int(taken_HTD.flat[0])
    token, channel = np.ogrid[: place_HTD.shape[1], : place_HTD.shape[2]]
    same = np.array_equal(taken_HTD, np.broadcast_to(token * part.size + first + channel, taken_HTD.shape))
    return (first, found.scale) if same else None


def _ordered(operand: Operand, order: list[int]) -> Operand:
    """The operand with its parts in another order."""
    return replace(operand, parts=tuple(operand.parts[i] for i in order)) if operand.parts else operand
