"""A tiny random Llama: written as a GGUF file with the `gguf` package, and computed in float64 numpy.

The weights are drawn in PyTorch's row order and only permuted for the file, and the quantised blocks are decoded here
by hand, so that neither the exporter's rotary order nor the `gguf` package's decoder is its own witness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz0123456789ĠĊ.<|>_")
MERGES = ("Ġ Ġ", "Ġ a", "t h", "th e", "Ġ the", "1 2")
MERGED = ("ĠĠ", "Ġa", "th", "the", "Ġthe", "12")
TOKENS = SPECIAL_TOKENS + LETTERS + MERGED
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@dataclass(frozen=True)
class TinyLlama:
    """Geometry of the model, and its weights as the file's quantised blocks stand for them (float64, `[O, I]`)."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    rope_theta: float = 500.0
    epsilon: float = 1e-5
    tied: bool = True
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path, *, architecture: str = "llama", drop: str = "", extra: str = "") -> None:
        """Write the GGUF file and fill `weights`; `drop` leaves a tensor out, `extra` adds one that is not Llama's."""
        writer = GGUFWriter(path, architecture)
        self._write_metadata(writer)
        for name, (shape, kind) in self._tensors().items():
            values = self._draw(name, shape)
            blocks = quantize(values, kind)
            self.weights[name] = _decode(blocks, kind).reshape(shape)
            part = name.removesuffix(".weight").split(".")[-1]
            heads = {"attn_q": self.num_heads, "attn_k": self.num_kv_heads}.get(part)
            if heads:  # rows (x0..x7, y0..y7) of a head become (x0, y0, x1, y1, ...)
                blocks = blocks.reshape(heads, 2, self.head_size // 2, -1).transpose(0, 2, 1, 3).reshape(blocks.shape)
            if name != drop:
                writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)
        if extra:
            writer.add_tensor(extra, np.ones(self.hidden_size, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float64 logits `[s, V]` of one sequence, every position from scratch."""
        w = self.weights
        hidden = w["token_embd.weight"][list(ids)]
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            hidden = hidden + self._attend(self._norm(hidden, block + "attn_norm.weight"), block)
            x = self._norm(hidden, block + "ffn_norm.weight")
            gate = x @ w[block + "ffn_gate.weight"].T
            up = x @ w[block + "ffn_up.weight"].T
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[block + "ffn_down.weight"].T
        head = w["token_embd.weight" if self.tied else "output.weight"]
        return self._norm(hidden, "output_norm.weight") @ head.T

    def _attend(self, x: np.ndarray, block: str) -> np.ndarray:
        w, size, length = self.weights, self.head_size, len(x)
        query, key, value = (x @ w[f"{block}attn_{part}.weight"].T for part in "qkv")
        mixed = []
        for head in range(self.num_heads):
            shared = head * self.num_kv_heads // self.num_heads
            q = self._turn(query[:, head * size : (head + 1) * size])
            k = self._turn(key[:, shared * size : (shared + 1) * size])
            scores = q @ k.T / np.sqrt(size)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            mixed.append(weights @ value[:, shared * size : (shared + 1) * size])
        return np.concatenate(mixed, axis=1) @ w[block + "attn_output.weight"].T

    def _turn(self, x: np.ndarray) -> np.ndarray:
        half = self.head_size // 2
        angle = np.arange(len(x))[:, None] * self.rope_theta ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + self.epsilon) * self.weights[name]

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(sum(name.encode()))
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return (rng.standard_normal(shape) * 2 / np.sqrt(shape[1])).astype(np.float32)

    def _tensors(self) -> dict[str, tuple[tuple[int, ...], GGMLQuantizationType]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        q4, q8, f16, f32 = (getattr(GGMLQuantizationType, kind) for kind in ("Q4_1", "Q8_0", "F16", "F32"))
        tensors = {"token_embd.weight": ((len(TOKENS), hidden), q8), "output_norm.weight": ((hidden,), f32)}
        if not self.tied:
            tensors["output.weight"] = ((len(TOKENS), hidden), q4)
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            tensors |= {
                block + "attn_norm.weight": ((hidden,), f32),
                block + "ffn_norm.weight": ((hidden,), f32),
                block + "attn_q.weight": ((queries, hidden), q4),
                block + "attn_k.weight": ((keys, hidden), q8),
                block + "attn_v.weight": ((keys, hidden), f16),
                block + "attn_output.weight": ((hidden, queries), q4),
                block + "ffn_gate.weight": ((inner, hidden), q4),
                block + "ffn_up.weight": ((inner, hidden), q8),
                block + "ffn_down.weight": ((hidden, inner), q4),
            }
        return tensors

    def _write_metadata(self, writer: GGUFWriter) -> None:
        writer.add_block_count(self.num_layers)
        writer.add_context_length(128)
        writer.add_embedding_length(self.hidden_size)
        writer.add_feed_forward_length(self.intermediate_size)
        writer.add_head_count(self.num_heads)
        writer.add_head_count_kv(self.num_kv_heads)
        writer.add_key_length(self.head_size)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(self.rope_theta)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(TOKENS) - len(SPECIAL_TOKENS)))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template(CHAT_TEMPLATE)


def _decode(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks of 32: Q8_0 is a scale and 32 int8; Q4_1 is scale, minimum and 16 bytes, the low nibbles first."""
    if kind in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        stored = np.float16 if kind == GGMLQuantizationType.F16 else np.float32
        return blocks.view(stored).astype(np.float64)
    if kind == GGMLQuantizationType.Q8_0:
        rows = blocks.reshape(-1, 34)
        return rows[:, :2].copy().view(np.float16).astype(np.float64) * rows[:, 2:].view(np.int8)
    rows = blocks.reshape(-1, 20)
    scale, minimum = rows[:, :4].copy().view(np.float16).astype(np.float64).T
    codes = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)
    return codes * scale[:, None] + minimum[:, None]
