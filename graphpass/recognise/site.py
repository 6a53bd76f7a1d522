"""What recognition finds: one `AttentionSite` for every form an export can take.

Shape letters: T new tokens, K keys (past and new), H query heads, G key/value heads, D and Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["AttentionSite", "CacheLink", "Operand", "Output", "Rotary", "ScoreFunction"]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A query, key or value: transposing `value` by `perm` and flattening gives `[T, heads * size]`, times `scale`.

    `perm` None: it is laid out so already. `value` None: it has `parts`, whose channels lie side by side in each head
    (a part with fewer heads serves several); or it lies behind the query in one packed value; or it is a value that is
    read from the keys.
    """

    value: ir.Value | None
    heads: int
    size: int
    perm: tuple[int, ...] | None = None
    scale: float = 1.0
    parts: tuple[Operand, ...] = ()

    @property
    def values(self) -> list[ir.Value]:
        """The values that it is taken from."""
        return [part.value for part in (self.parts or (self,)) if part.value is not None]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the attention output `[T, H * Dv]` goes: it replaces `value`, by a transpose when `perm` is given.

    `dims` is the shape of `value` (before `perm`: of the reshape), -1 at the token axis.
    """

    value: ir.Value
    dims: tuple[int, ...]
    perm: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CacheLink:
    """A cache input, where new tokens are appended to it, and the output that carries the result."""

    past: ir.Value
    node: ir.Node
    joined: ir.Value
    new: ir.Value | None
    present: ir.Value | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreFunction:
    """What becomes of q.k: see the order of scores in the contract. `window` None sees all of the past."""

    scale: float
    softcap: float = 0.0
    window: int | None = None
    slopes: tuple[float, ...] = ()
    sinks: tuple[float, ...] = ()
    limit: int | None = None

    @property
    def kind(self) -> str:
        """A word for reports."""
        words = ["causal" if self.window is None else f"window {self.window}"]
        if self.slopes:
            words.append("alibi")
        return " + ".join(words)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary embedding taken into the op: tables `[R, rotary_dim / 2]` as arrays."""

    cos: np.ndarray[Any, Any]
    sin: np.ndarray[Any, Any]
    interleaved: bool
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """One attention of the source, in the terms of the op's contract.

    `latent`: its value is the first `value.size` channels of its key, times `value.scale`; there is one cache.
    `packed`: keys and values were found to lie behind the query in one value, from which all three are taken.
    """

    node: ir.Node
    form: str
    query: Operand
    key: Operand
    value: Operand
    output: Output
    score: ScoreFunction
    key_cache: tuple[CacheLink, ...] = ()
    value_cache: tuple[CacheLink, ...] = ()
    rotary: Rotary | None = None
    q_norm: np.ndarray[Any, Any] | None = None
    k_norm: np.ndarray[Any, Any] | None = None
    norm_epsilon: float = 1e-6
    latent: bool = False
    packed: bool = False
    dropped: tuple[ir.Node, ...] = field(default=())

    @property
    def operands(self) -> list[ir.Value]:
        """The values that query, key and value are taken from."""
        return [v for operand in (self.query, self.key, self.value) for v in operand.values]

    @property
    def heads(self) -> int:
        """Query heads H."""
        return self.query.heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads G."""
        return self.key.heads
