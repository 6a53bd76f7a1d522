"""PagedAttention in PyTorch, written from custom_ops/README.md alone: float32 arithmetic, the whole contract.

    PYTHONPATH=examples/torch_backend pagegraft conformance --backend torch_backend:TorchBackend

Forbidden block ids and slots are treated as -1; other malformed calls are not checked.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from pagegraft.custom_ops.conformance import Capabilities
from pagegraft.custom_ops.spec import AttentionAttributes

_BITS = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor that shares the array's memory."""
    if array.dtype.name in _BITS:
        bits, kind = _BITS[array.dtype.name]
        return torch.from_numpy(array.view(bits)).view(kind)
    return torch.from_numpy(array)


class TorchBackend:
    """The backend: its claims, and one call."""

    name = "torch"

    def capabilities(self) -> Capabilities:
        """Everything but errors."""
        return Capabilities(bad_ids="masked", validates=False, max_cache_bytes=1 << 34)

    def run(self, feeds: dict[str, np.ndarray], attributes: dict[str, Any]) -> dict[str, np.ndarray]:
        """One call; the caches in `feeds` are updated in place."""
        call = _Call({n: to_torch(a) for n, a in feeds.items()}, AttentionAttributes.from_dict(attributes))
        output = call.compute().to(call.x["query"].dtype)
        if output.dtype == torch.bfloat16:
            result = output.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            result = output.numpy()
        outputs = {"output": result}
        for name in ("key_cache", "value_cache"):
            if name in feeds:
                outputs[f"{name}_out"] = feeds[name]
        for letter, quant in (("k", call.a.k_quant_type), ("v", call.a.v_quant_type)):
            if quant == "PER_TOKEN":
                outputs[f"{letter}_scale_out"] = feeds[f"{letter}_scale"]
        return outputs


class _Call:
    def __init__(self, x: dict[str, torch.Tensor], a: AttentionAttributes) -> None:
        self.x, self.a = x, a
        self.N, self.B = x["key_cache"].shape[:2]
        self.H, self.G = a.num_heads, a.kv_num_heads
        self.cache_type = a.k_cache_dtype or str(x["key_cache"].dtype).removeprefix("torch.")
        self.D, self.Dv = self._head_sizes()
        lengths = x["cumulative_sequence_length"].long()
        self.rows = list(zip(lengths[:-1].tolist(), lengths[1:].tolist(), strict=True))
        self.past = x["past_seqlens"].long()
        self.table = torch.where((x["block_table"] < -1) | (x["block_table"] >= self.N), -1, x["block_table"].long())
        self.position = torch.cat(
            [p + torch.arange(e - b) for p, (b, e) in zip(self.past, self.rows, strict=True)]
            or [torch.zeros(0, dtype=torch.long)]
        )

    def _head_sizes(self) -> tuple[int, int]:
        if "key" in self.x:
            size = self.x["query"].shape[1] // self.H
            if self.a.latent:
                return size, self.a.v_head_size or size
            return size, self.x["value"].shape[1] // self.G
        widths = [self.x[n].shape[3] for n in ("key_cache", "value_cache")]
        if self.cache_type != "int4":
            return widths[0], widths[1]
        for d in (2 * widths[0], 2 * widths[0] - 1):
            for dv in (2 * widths[1], 2 * widths[1] - 1):
                if self.H * d + self.G * (d + dv) == self.x["query"].shape[1]:
                    return d, dv
        raise ValueError("query: the packed width fits no head size")

    def compute(self) -> torch.Tensor:
        """Steps 1 to 5 of the contract; returns float32 [T, H*Dv]."""
        query, key, value = self._split()
        if "q_norm_weight" in self.x:
            query, key = self._norm(query, "q_norm_weight"), self._norm(key, "k_norm_weight")
        if self.a.do_rotary:
            query, key = self._rotate(query), self._rotate(key)
        slots = self._slots()
        self._write("key", key, slots)
        if value is not None:
            self._write("value", value, slots)
        output = torch.zeros(len(query), self.H, self.Dv)
        for s, (begin, end) in enumerate(self.rows):
            if end > begin:
                output[begin:end] = self._attend(s, query[begin:end])
        return output.reshape(len(query), self.H * self.Dv)

    def _split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        query, key, value = self.x["query"], self.x.get("key"), self.x.get("value")
        if key is None:
            query, key, value = query.split([self.H * self.D, self.G * self.D, self.G * self.Dv], dim=1)
        tokens = query.shape[0]
        values = None if value is None else value.float().reshape(tokens, self.G, self.Dv)
        return query.float().reshape(tokens, self.H, self.D), key.float().reshape(tokens, self.G, self.D), values

    def _norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.a.qk_norm_epsilon) * self.x[weight].float()

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (self.x[n].float()[self.position][:, None, :] for n in ("cos_cache", "sin_cache"))
        half = cos.shape[-1]
        start = self.a.rotary_offset
        first = start + torch.arange(half) * (2 if self.a.rotary_interleaved else 1)
        second = first + (1 if self.a.rotary_interleaved else half)
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def _slots(self) -> torch.Tensor:
        if "slot_mapping" in self.x:
            slots = self.x["slot_mapping"].long()
            return torch.where((slots < -1) | (slots >= self.N * self.B), -1, slots)
        sequence = torch.repeat_interleave(torch.tensor([e - b for b, e in self.rows], dtype=torch.long))
        if not len(sequence):
            return sequence
        block = self.table[sequence, self.position // self.B]
        return torch.where(block < 0, -1, block * self.B + self.position % self.B)

    def _scale(self, letter: str) -> torch.Tensor | None:
        """Static scale shaped for [..., G, D], None where there is none."""
        quant = getattr(self.a, f"{letter}_quant_type")
        if quant == "PER_TENSOR":
            return self.x[f"{letter}_scale"][0]
        return self.x[f"{letter}_scale"][:, 0, :] if quant == "PER_CHANNEL" else None

    def _write(self, which: str, x: torch.Tensor, slots: torch.Tensor) -> None:
        written = slots >= 0
        x, block, offset = x[written], slots[written] // self.B, slots[written] % self.B
        scale = self._scale(which[0])
        if getattr(self.a, f"{which[0]}_quant_type") == "PER_TOKEN":
            scale = (x.abs().amax(-1) / 127.0) if len(x) else x.sum(-1)
            self.x[f"{which[0]}_scale"][block, :, offset] = scale
            scale = scale[..., None]
        self.x[f"{which}_cache"][block, offset] = self._encode(x, scale)

    def _encode(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        cache = self.x["key_cache"].dtype
        if scale is None:
            return x.to(cache)
        codes = torch.where(scale == 0, 0.0, x / scale)
        if self.cache_type == "float8_e4m3fn":
            return codes.clamp(-448, 448).to(cache)
        if self.cache_type == "int8":
            return codes.round().clamp(-128, 127).to(cache)
        nibbles = (codes.round().clamp(-8, 7) + 8).to(torch.uint8)
        nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.shape[-1] % 2), value=8)
        return nibbles[..., 0::2] | nibbles[..., 1::2] << 4

    def _read(self, which: str, block: torch.Tensor, offset: torch.Tensor, size: int) -> torch.Tensor:
        """Keys or values of positions, [P, H, size]."""
        stored = self.x[f"{which}_cache"][block, offset]
        if self.cache_type == "int4":
            codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2)[..., :size].float() - 8
        else:
            codes = stored.float()
        scale = self._scale(which[0])
        if getattr(self.a, f"{which[0]}_quant_type") == "PER_TOKEN":
            scale = self.x[f"{which[0]}_scale"][block, :, offset][..., None]
        values = codes if scale is None else codes * scale
        return values.repeat_interleave(self.H // self.G, dim=1)

    def _attend(self, s: int, query: torch.Tensor) -> torch.Tensor:
        past, new, window = int(self.past[s]), len(query), self.a.local_window_size
        start = max(0, past + 1 - window) if window > 0 else 0
        j = torch.arange(start, past + new)
        block = self.table[s, j // self.B]
        j, block = j[block >= 0], block[block >= 0]
        if not len(j):
            return torch.zeros(new, self.H, self.Dv)
        key = self._read("key", block, j % self.B, self.D)
        value = key[..., : self.Dv] if self.a.latent else self._read("value", block, j % self.B, self.Dv)
        p = past + torch.arange(new)
        distance = j[None, :] - p[:, None]
        scale = self.D**-0.5 if self.a.scale is None else self.a.scale
        score = scale * torch.einsum("nhd,phd->hnp", query, key)
        if self.a.alibi_slopes:
            score = score + torch.tensor(self.a.alibi_slopes)[:, None, None] * distance
        if self.a.softcap > 0:
            score = self.a.softcap * torch.tanh(score / self.a.softcap)
        sees = distance <= 0 if self.a.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if window > 0:
            sees = sees & (distance > -window)
        score = score.masked_fill(~sees, -torch.inf)
        sink = self.x["head_sink"].float() if "head_sink" in self.x else torch.full((self.H,), -torch.inf)
        top = torch.maximum(score.amax(-1), sink[:, None])
        top = torch.where(top == -torch.inf, 0.0, top)
        weight = torch.exp(score - top[..., None])
        total = weight.sum(-1) + torch.exp(sink[:, None] - top)
        out = torch.einsum("hnp,phd->nhd", weight, value)
        return out / torch.where(total == 0, 1.0, total).T[..., None]
