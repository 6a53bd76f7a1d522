"""Takes the rotary embedding of one part of a query and key into the op, which can rotate channels from an offset on.

A latent attention has it so: the latent carries no position, a part of its own behind it does.
"""

from __future__ import annotations

from dataclasses import replace

from .fuse import Fuser
from .site import AttentionSite, Operand

__all__ = ["fuse_parts"]

#: The op rotates from a multiple of this on.
_OFFSET_STEP = 8


def fuse_parts(fuser: Fuser, site: AttentionSite) -> AttentionSite:
    """The site with the first part that is proven to be rotated taken from before its rotation, or unchanged.

    Values that are read from the keys must not be rotated: their part is left alone.
    """
    offset = 0
    for number, (query, key) in enumerate(zip(site.query.parts, site.key.parts, strict=True)):
        if offset % _OFFSET_STEP == 0 and not (site.latent and offset < site.value.size):
            fused = fuser.fuse(replace(site, latent=False, query=query, key=key))
            if fused.rotary is not None and fused.q_norm is None and fused.key.values:
                moved = replace(fused.query, scale=fused.query.scale * fused.key.scale)  # keys are stored unscaled
                return replace(
                    site,
                    query=_with_part(site.query, number, moved),
                    key=_with_part(site.key, number, replace(fused.key, scale=1.0)),
                    rotary=replace(fused.rotary, offset=offset + fused.rotary.offset),
                )
        offset += key.size
    return site


def _with_part(operand: Operand, number: int, part: Operand) -> Operand:
    return replace(operand, parts=tuple(part if i == number else p for i, p in enumerate(operand.parts)))
