"""Takes query, key and value from one value when they lie side by side in it, as the op's packed input wants them.

Upstream of the three, the nearest value that all of their token data passes is fed with numbers that name their place
(layout.py): the pieces must be the query's channels of a token, then the key's, then the value's, unscaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ..evaluate import Unevaluable
from .layout import TOKENS, moved
from .probe import Probe
from .site import AttentionSite, Operand

__all__ = ["pack_operands"]


def pack_operands(probe: Probe, sites: Sequence[AttentionSite], owners: Sequence[int]) -> list[AttentionSite]:
    """The sites, packed where that is proven. `owners` says per site whose cache it reads: shared ones stay apart."""
    return [
        _packed(probe, site) if owners.count(owner) == 1 else site for site, owner in zip(sites, owners, strict=True)
    ]


def _packed(probe: Probe, site: AttentionSite) -> AttentionSite:
    operands = (site.query, site.key, site.value)
    if site.latent or any(o.value is None or o.perm is not None for o in operands):
        return site
    common = next(iter(probe.view.dominators(*site.operands, limit=24)), None)
    try:
        if common is None or not _side_by_side(probe, common, operands):
            return site
    except Unevaluable:
        return site
    dropped = {*site.dropped, *(n for o in operands for n in probe.view.between([common], o.value))}  # type: ignore[arg-type]
    return replace(
        site,
        query=replace(site.query, value=common),
        key=replace(site.key, value=None),
        value=replace(site.value, value=None),
        packed=True,
        dropped=tuple(sorted(dropped, key=probe.view.order.__getitem__)),
    )


def _side_by_side(probe: Probe, common: ir.Value, operands: Sequence[Operand]) -> bool:
    """True when each token's row of `common` is query, key and value one behind the other."""
    widths = [o.heads * o.size for o in operands]
    if int(np.prod(probe.shape(common, TOKENS, 0))) != TOKENS * sum(widths):
        return False
    places = np.arange(TOKENS * sum(widths)).reshape(TOKENS, -1)
    for operand, expected in zip(operands, np.split(places, np.cumsum(widths)[:-1], axis=1), strict=True):
        found = None if operand.value is None else moved(probe, common, operand.value)
        if found is None or found.scale != 1.0 or not np.array_equal(found.index.reshape(-1), expected.reshape(-1)):
            return False
    return True
