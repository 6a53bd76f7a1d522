"""Decoders written by hand in the manner of model code published beside weights, which transformers does not hold.

Caches are lists of tensors that the caller passes flat: key, value of each layer. Each entry of MODULES makes a
module, the shapes of its caches, and how to export it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

VOCAB, HIDDEN, HEADS, GROUPS, SIZE, LAYERS = 128, 32, 4, 2, 8, 2
Tensors = tuple[torch.Tensor, ...]
CacheShape = tuple[int, ...]
#: Marks in the shape of a cache.
BATCH, TOKENS = -1, 0
#: Makes a module, the shapes of its caches, and how to export it.
Maker = Callable[[], tuple[nn.Module, list[CacheShape], dict[str, Any]]]


class Norm(nn.Module):
    """RMSNorm spelled out."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last axis."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def causal(mask: torch.Tensor, new: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Additive `[batch, 1, new, total]`: the rule and the padding in one, as older model code spells it."""
    total = mask.shape[1]
    rows = torch.arange(total)[total - new :, None]
    seen = (torch.arange(total)[None] <= rows)[None, None] & mask[:, None, None].bool()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


class Decoder(nn.Module):
    """Embedding, layers, head; subclasses say what attention does."""

    def __init__(self, attention: Callable[[], nn.Module], layers: int = LAYERS, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale  # of embeddings and, by its root, of each layer's contribution
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.attention = nn.ModuleList(attention() for _ in range(layers))
        self.norms = nn.ModuleList(Norm() for _ in range(2 * layers + 1))
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 48, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(48, HIDDEN, bias=False) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.sequence_first = False

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor
    ) -> Tensors:
        """Logits and caches."""
        hidden = self.embed(input_ids) * self.scale
        if self.sequence_first:
            hidden = hidden.transpose(0, 1)
        present: list[torch.Tensor] = []
        each = len(past) // len(self.attention)
        residual = 1.4 / math.sqrt(len(self.attention)) if self.scale != 1.0 else 1.0
        for i, attention in enumerate(self.attention):
            mixed, caches = attention(
                self.norms[2 * i](hidden), attention_mask, position_ids, past[i * each : (i + 1) * each]
            )
            hidden = hidden + mixed * residual
            hidden = (
                hidden + self.down[i](torch.nn.functional.silu(self.up[i](self.norms[2 * i + 1](hidden)))) * residual
            )
            present += caches
        hidden = self.norms[-1](hidden)
        if self.sequence_first:
            hidden = hidden.transpose(0, 1)
        return (self.head(hidden / self.scale), *present)


def half_rotary(x: torch.Tensor, positions: torch.Tensor, base: float = 1e4) -> torch.Tensor:
    """Split halves, `[B, T, H, D]`."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None].float() * base ** (-torch.arange(half).float() / half)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class SequenceFirst(nn.Module):
    """Hidden states `[T, B, C]`, caches `[T, B, G, D]`, interleaved rotary on the first half of each head, key heads
    repeated by expanding a cached tensor, baddbmm with the scale inside, query and key and value in one product."""

    def __init__(self, interleaved: bool = True) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.packed = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        frequency = 1.0 / (1e4 ** (torch.arange(0, SIZE // 2, 2).float() / (SIZE // 2)))
        angles = torch.outer(torch.arange(128).float(), frequency)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def rotate(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """`x` `[T, B, H, D]`, `table` `[T, B, D / 4, 2]`."""
        rotated, plain = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        table = table[:, :, None]
        if self.interleaved:
            pairs = rotated.reshape(*rotated.shape[:-1], SIZE // 4, 2)
            turned = torch.stack(
                [
                    pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
                    pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
                ],
                -1,
            ).flatten(3)
        else:
            first, second = rotated.chunk(2, -1)
            cos, sin = table[..., 0], table[..., 1]
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned, plain], -1)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`x` `[T, B, C]`."""
        new, batch = x.shape[0], x.shape[1]
        packed = self.packed(x)
        q, k, v = packed.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], -1)
        q, k, v = (t.reshape(new, batch, -1, SIZE) for t in (q, k, v))
        table = self.table[positions].transpose(0, 1)
        q, k = self.rotate(q, table), self.rotate(k, table)
        k, v = torch.cat([past[0], k], 0), torch.cat([past[1], v], 0)
        present = [k, v]
        total = k.shape[0]
        k, v = (
            t.unsqueeze(3).expand(-1, -1, -1, HEADS // GROUPS, -1).reshape(total, batch, HEADS, SIZE) for t in (k, v)
        )
        q = q.reshape(new, batch * HEADS, SIZE)
        k = k.reshape(total, batch * HEADS, SIZE)
        scores = torch.bmm(q.transpose(0, 1) * (1.0 / math.sqrt(SIZE)), k.transpose(0, 1).transpose(1, 2))
        scores = scores.view(batch, HEADS, new, total)
        hide = (causal(mask, new) < -1.0).expand(batch, 1, new, total)
        scores = scores.masked_fill(hide, -10000.0 * 10)
        weights = torch.softmax(scores.float(), -1).view(batch * HEADS, new, total)
        v = v.reshape(total, batch * HEADS, SIZE)
        mixed = torch.bmm(weights, v.transpose(0, 1)).view(batch, HEADS, new, SIZE)
        mixed = mixed.permute(2, 0, 1, 3).reshape(new, batch, HEADS * SIZE)
        return self.out(mixed), present


class PackedAlibi(nn.Module):
    """One product for query, key and value; ALiBi as a constant table that is sliced, no rotary."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        slopes = torch.tensor([2.0 ** -(2 * (i + 1)) for i in range(HEADS)])
        table = slopes[:, None, None] * torch.arange(64).float()[None, None]
        future = torch.triu(torch.full((64, 64), float("-inf")), 1)
        self.register_buffer("table", table + future[None], persistent=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Keys count from the start of the table: rows differ by a constant only, which softmax does not see."""
        batch, new, _ = x.shape
        q, k, v = self.packed(x).unflatten(-1, (3, HIDDEN)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        q, k, v = (t.view(batch, new, HEADS, SIZE).transpose(1, 2) for t in (q, k, v))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        total = k.shape[2]
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(SIZE)
        bias = self.table[:, :total, :total][:, -new:]
        padding = (mask[:, None, None] - 1).float() * 1e4
        scores = torch.max(scores + bias + padding, torch.tensor(torch.finfo(torch.float32).min))
        mixed = torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).reshape(batch, new, HIDDEN)
        return self.out(mixed), [k, v]


class InterleavedPack(nn.Module):
    """Packed product with the queries of a group next to their key and value; caches stay `[B, T, G, D]`; einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * SIZE, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`[B, T, G, heads of the group + 2, D]`."""
        batch, new, _ = x.shape
        share = HEADS // GROUPS
        packed = self.packed(x).view(batch, new, GROUPS, share + 2, SIZE)
        q, k, v = packed[..., :share, :].reshape(batch, new, HEADS, SIZE), packed[..., -2, :], packed[..., -1, :]
        q, k = half_rotary(q, positions), half_rotary(k, positions)
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        present = [k, v]
        k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5 + causal(mask, new)
        mixed = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
        return self.out(mixed.reshape(batch, new, HIDDEN)), present


class GroupedHeads(nn.Module):
    """Separate products with bias for the query's heads and the fewer heads of key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * SIZE) for n in (HEADS, GROUPS, GROUPS))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)


class TransposedKeys(GroupedHeads):
    """Separate products with bias, keys cached as `[B, G, D, T]`, groups as an axis of their own."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Keys transposed in the cache, grouped products without repeating heads."""
        batch, new, _ = x.shape
        q = half_rotary(self.q(x).view(batch, new, HEADS, SIZE), positions).transpose(1, 2)
        k = half_rotary(self.k(x).view(batch, new, GROUPS, SIZE), positions).permute(0, 2, 3, 1)
        v = self.v(x).view(batch, new, GROUPS, SIZE).transpose(1, 2)
        k, v = torch.cat([past[0], k], 3), torch.cat([past[1], v], 2)
        q = q.view(batch, GROUPS, HEADS // GROUPS, new, SIZE)
        scores = torch.matmul(q, k[:, :, None]) / 3.0 + causal(mask, new)[:, :, None]
        mixed = torch.matmul(torch.softmax(scores, -1), v[:, :, None])
        mixed = mixed.reshape(batch, HEADS, new, SIZE).transpose(1, 2)
        return self.out(mixed.reshape(batch, new, HIDDEN)), [k, v]


class SharedFused(nn.Module):
    """One key and value head for all, cached as one `[B, T, 2D]` tensor; learned positions stay outside."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(HIDDEN, HIDDEN + 2 * SIZE)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Rows mix tokens and heads: `[B, T * H, D]` by `[B, D, K]`."""
        batch, new, _ = x.shape
        q, joined = self.packed(x).split((HIDDEN, 2 * SIZE), dim=2)
        joined = torch.cat([past[0], joined], 1)
        k, v = joined.split((SIZE, SIZE), dim=-1)
        scores = torch.bmm(q.reshape(batch, new * HEADS, SIZE), k.transpose(1, 2)) * SIZE**-0.5
        scores = scores.view(batch, new, HEADS, -1)
        seen = causal(mask, new).transpose(1, 2) > -1.0
        scores = torch.where(seen, scores, torch.finfo(torch.float32).min)
        weights = torch.softmax(scores, -1).view(batch, new * HEADS, -1)
        return self.out(torch.bmm(weights, v).view(batch, new, HIDDEN)), [joined]


class RotatedAfterCache(nn.Module):
    """Keys rotated after the cache, at every step anew, by positions counted in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Caches hold keys without positions, as models with attention sinks keep them."""
        batch, new, _ = x.shape
        q, k, v = (f(x).view(batch, new, HEADS, SIZE) for f in (self.q, self.k, self.v))
        q = half_rotary(q, positions).transpose(1, 2)
        k, v = torch.cat([past[0], k.transpose(1, 2)], 2), torch.cat([past[1], v.transpose(1, 2)], 2)
        total = torch.arange(k.shape[2])[None]
        turned = half_rotary(k.transpose(1, 2), total).transpose(1, 2)
        scores = torch.matmul(q, turned.transpose(2, 3)) / math.sqrt(SIZE) + causal(mask, new)
        mixed = torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).reshape(batch, new, HIDDEN)
        return self.out(mixed), [k, v]


class Latent(nn.Module):
    """Keys and values compressed to one vector a token and attended to in that space: the matrix that would expand
    keys is multiplied into the query, the one that would expand values into the output. A rotated key of its own, one
    for all heads, carries positions. Subclasses say how it is cached and multiplied."""

    RANK, PLAIN, ROTATED, VALUE = 16, 12, 8, 8

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (self.PLAIN + self.ROTATED), bias=False)
        self.down = nn.Linear(HIDDEN, self.RANK + self.ROTATED, bias=False)
        self.norm = Norm(self.RANK)
        self.up_key = nn.Parameter(torch.randn(HEADS, self.PLAIN, self.RANK) * 0.3)
        self.up_value = nn.Parameter(torch.randn(HEADS, self.RANK, self.VALUE) * 0.3)
        self.out = nn.Linear(HEADS * self.VALUE, HIDDEN, bias=False)
        self.scale = (self.PLAIN + self.ROTATED) ** -0.5

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Tensors:
        """Queries `[B, T, H, R]` and `[B, T, H, Dr]`, latent `[B, T, R]`, rotated key `[B, T, Dr]`."""
        batch, new, _ = x.shape
        q = self.q(x).view(batch, new, HEADS, self.PLAIN + self.ROTATED)
        plain, rotated = q.split([self.PLAIN, self.ROTATED], -1)
        latent, key = self.down(x).split([self.RANK, self.ROTATED], -1)
        key = half_rotary(key[:, :, None], positions)[:, :, 0]
        absorbed = torch.einsum("bthd,hdr->bthr", plain, self.up_key)
        return absorbed, half_rotary(rotated, positions), self.norm(latent), key

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """`mixed` `[B, H, T, R]`."""
        values = torch.matmul(mixed, self.up_value).transpose(1, 2)
        return self.out(values.reshape(values.shape[0], values.shape[1], HEADS * self.VALUE))


class LatentTwoCaches(Latent):
    """Latents `[B, T, R]` and rotated keys `[B, 1, T, Dr]`; two products of different layouts are added."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The scale is in each product."""
        absorbed, rotated, latent, key = self.project(x, positions)
        latent, key = torch.cat([past[0], latent], 1), torch.cat([past[1], key[:, None]], 2)
        scores = torch.matmul(absorbed.transpose(1, 2) * self.scale, latent[:, None].transpose(2, 3))
        scores = scores + torch.matmul(rotated.transpose(1, 2), key.transpose(2, 3)) * self.scale
        weights = torch.softmax(scores + causal(mask, x.shape[1]), -1)
        return self.finish(torch.matmul(weights, latent[:, None])), [latent, key]


class LatentEinsum(Latent):
    """Latents `[B, T, R]` and rotated keys `[B, T, Dr]`, einsum with the heads behind the tokens."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Scores `[B, T, H, K]`."""
        absorbed, rotated, latent, key = self.project(x, positions)
        latent, key = torch.cat([past[0], latent], 1), torch.cat([past[1], key], 1)
        scores = torch.einsum("bshr,btr->bsht", absorbed, latent) + torch.einsum("bshr,btr->bsht", rotated, key)
        scores = scores * self.scale + causal(mask, x.shape[1]).transpose(1, 2)
        mixed = torch.einsum("bsht,btr->bshr", torch.softmax(scores, -1), latent)
        return self.finish(mixed.transpose(1, 2)), [latent, key]


class LatentOneCache(Latent):
    """Latent and rotated key in one cache `[B, T, R + Dr]`; rows of one product are `[B, H * T, R + Dr]`."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Heads are outermost in the rows."""
        absorbed, rotated, latent, key = self.project(x, positions)
        joined = torch.cat([past[0], torch.cat([latent, key], -1)], 1)
        batch, new, total = x.shape[0], x.shape[1], joined.shape[1]
        q = torch.cat([absorbed, rotated], -1).transpose(1, 2).reshape(batch, HEADS * new, -1)
        scores = torch.bmm(q, joined.transpose(1, 2)) * self.scale
        scores = scores.view(batch, HEADS, new, total) + causal(mask, new)
        weights = torch.softmax(scores, -1).view(batch, HEADS * new, total)
        mixed = torch.bmm(weights, joined[..., : self.RANK])
        return self.finish(mixed.view(batch, HEADS, new, self.RANK)), [joined]


class RowsOfGroups(GroupedHeads):
    """Rows are `[B * G, heads of the group * T, D]`: heads on both sides of the axis that holds the tokens."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Caches `[B, G, T, D]`."""
        batch, new, _ = x.shape
        q = half_rotary(self.q(x).view(batch, new, HEADS, SIZE), positions).transpose(1, 2)
        k = half_rotary(self.k(x).view(batch, new, GROUPS, SIZE), positions).transpose(1, 2)
        v = self.v(x).view(batch, new, GROUPS, SIZE).transpose(1, 2)
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        total, share = k.shape[2], HEADS // GROUPS
        rows = q.reshape(batch * GROUPS, share * new, SIZE)
        scores = torch.bmm(rows, k.reshape(batch * GROUPS, total, SIZE).transpose(1, 2)) / 3.0
        scores = scores.view(batch, HEADS, new, total) + causal(mask, new)
        weights = torch.softmax(scores, -1).view(batch * GROUPS, share * new, total)
        mixed = torch.bmm(weights, v.reshape(batch * GROUPS, total, SIZE)).view(batch, HEADS, new, SIZE)
        return self.out(mixed.transpose(1, 2).reshape(batch, new, HIDDEN)), [k, v]


class Holes(nn.Module):
    """Causal attention whose mask has holes: every fourth key of the past is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Caches `[B, H, T, D]`."""
        batch, new, _ = x.shape
        q, k, v = (f(x).view(batch, new, HEADS, SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        total = torch.arange(k.shape[2])
        rows = total[total.shape[0] - new :, None]
        hidden = ((rows - total[None]) % 4 == 3)[None, None]
        scores = torch.matmul(q, k.transpose(2, 3)) / 3.0 + causal(mask, new)
        weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(torch.float32).min), -1)
        return torch.matmul(weights, v).transpose(1, 2).reshape(batch, new, HIDDEN), [k, v]


def _maker(
    attention: Callable[[], nn.Module], *caches: CacheShape, scale: float = 1.0, opset: int = 17, dynamo: bool = False
) -> Maker:
    def make() -> tuple[nn.Module, list[CacheShape], dict[str, Any]]:
        torch.manual_seed(5)
        model = Decoder(attention, scale=scale).eval()
        model.sequence_first = caches[0][0] == TOKENS
        return model, list(caches) * LAYERS, {"dynamo": dynamo, "opset": opset}

    return make


HEADS_FIRST = (BATCH, GROUPS, TOKENS, SIZE)
LATENT, ROTATED = Latent.RANK, Latent.ROTATED
MODULES: dict[str, Maker] = {
    "sequence_first_interleaved": _maker(lambda: SequenceFirst(interleaved=True), *[(TOKENS, BATCH, GROUPS, SIZE)] * 2),
    "sequence_first_half": _maker(lambda: SequenceFirst(interleaved=False), *[(TOKENS, BATCH, GROUPS, SIZE)] * 2),
    "packed_alibi": _maker(PackedAlibi, *[(BATCH, HEADS, TOKENS, SIZE)] * 2),
    "interleaved_pack": _maker(InterleavedPack, *[(BATCH, TOKENS, GROUPS, SIZE)] * 2, opset=14),
    "scaled": _maker(InterleavedPack, *[(BATCH, TOKENS, GROUPS, SIZE)] * 2, scale=12.0),
    "transposed_keys": _maker(TransposedKeys, (BATCH, GROUPS, SIZE, TOKENS), HEADS_FIRST),
    "shared_fused": _maker(SharedFused, (BATCH, TOKENS, 2 * SIZE), opset=13),
    "rotated_after_cache": _maker(RotatedAfterCache, *[(BATCH, HEADS, TOKENS, SIZE)] * 2),
    "latent_two_caches": _maker(LatentTwoCaches, (BATCH, TOKENS, LATENT), (BATCH, 1, TOKENS, ROTATED)),
    "latent_two_caches__dyn": _maker(
        LatentTwoCaches, (BATCH, TOKENS, LATENT), (BATCH, 1, TOKENS, ROTATED), opset=18, dynamo=True
    ),
    "latent_einsum": _maker(LatentEinsum, (BATCH, TOKENS, LATENT), (BATCH, TOKENS, ROTATED)),
    "latent_einsum__dyn": _maker(
        LatentEinsum, (BATCH, TOKENS, LATENT), (BATCH, TOKENS, ROTATED), opset=18, dynamo=True
    ),
    "latent_one_cache": _maker(LatentOneCache, (BATCH, TOKENS, LATENT + ROTATED)),
    "latent_one_cache__dyn": _maker(LatentOneCache, (BATCH, TOKENS, LATENT + ROTATED), opset=18, dynamo=True),
    "rows_of_groups": _maker(RowsOfGroups, *[HEADS_FIRST] * 2),
    "holes": _maker(Holes, *[(BATCH, HEADS, TOKENS, SIZE)] * 2),
}


def without_stack_traces(file: Path) -> None:
    """Takes out where in whose source tree each node was traced, which is a quarter of a small file."""
    model = onnx.load(file)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            kept = [entry for entry in node.metadata_props if ".py" not in entry.value]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
    onnx.save(model, file)
