"""A conformance case: an id that never changes, what to run, and what has to come out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..call import Call, Setup, build

__all__ = ["GROUPS", "Case", "Kind", "case"]

GROUPS: Final = ("core", "masks", "layout", "quantised", "rotary", "latent", "negative", "stress")

#: compare: one run against the expected outputs. error: the run must fail and name `names`. chunks: a prefill split at
#: every place gives what one run gives. batch: each sequence alone gives what it gives in the batch. far: block ids so
#: high that byte or element offsets pass 2^31 and 2^32, in caches of mostly untouched memory.
Kind = Literal["compare", "error", "chunks", "batch", "far"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`spoil` makes a valid call malformed (kind error). `names`: words of which the error message must hold one.

    `bad_id`: the violation is a block id or slot that a backend may treat as -1 instead, and `features` are parts of
    the contract that the call needs beyond those its inputs show.
    """

    id: str
    group: str
    setup: Setup
    kind: Kind = "compare"
    spoil: Callable[[Call], None] | None = None
    names: tuple[str, ...] = ()
    bad_id: bool = False
    features: frozenset[str] = frozenset()

    @property
    def seed(self) -> int:
        """Seed of the case's data, from its id."""
        return zlib.crc32(self.id.encode())

    def call(self) -> Call:
        """The valid call, before `spoil`."""
        return build(self.setup, self.seed)


def case(id: str, *, kind: Kind = "compare", **setup: Any) -> Case:
    """A case whose group is the first part of its id; the keywords are those of Setup."""
    group = id.split("/")[0]
    features = {"unmapped_blocks"} if setup.get("unmapped") else set()
    return Case(id=id, group=group, kind=kind, setup=Setup(**setup), features=frozenset(features))
