"""Reads a Llama-architecture GGUF file: geometry, vocabulary, and weights as float32, a few rows at a time.

GGUF keeps the query and key projections with rotary pairs interleaved (row 2i and 2i+1 turn together); exported
PyTorch models pair row i with row i + D/2. `_undo_rotary_interleave` restores the latter order.

Shape letters: `O` output features (rows of a projection), `I` input features, `V` vocabulary, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DemoError

__all__ = ["GgufModel", "LlamaShape", "Vocabulary", "Weight", "require_gguf_package"]

FloatArray = npt.NDArray[np.float32]

_ROWS_PER_CHUNK = 4096  # of the embedding: bounds the memory that dequantising takes

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Geometry and constants of a Llama decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE vocabulary as GGUF stores it; `token_types`: 1 normal, 3 control, 4 user-defined."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    pre_tokenizer: str
    bos_token_id: int | None
    eos_token_id: int
    unk_token_id: int | None
    pad_token_id: int | None
    chat_template: str | None


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One float32 initializer: its name and shape in the ONNX model, and its rows in order, chunk by chunk."""

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[FloatArray]]

    @property
    def num_bytes(self) -> int:
        """Size of the float32 data."""
        return int(np.prod(self.shape, dtype=np.int64)) * 4


class GgufModel:
    """A Llama model in a GGUF file, memory-mapped; nothing is dequantised before `weights` are consumed.

    Raises:
        DemoError: the file is not GGUF, not a plain Llama, or its vocabulary is not byte-level BPE.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._fields: Mapping[str, Any] = self._reader.fields
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise DemoError(f"{path.name}: architecture '{architecture}' is not supported: give a Llama model")
        self.shape = self._read_shape()

    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tables and special tokens."""
        kind = self._field("tokenizer.ggml.model")
        if kind != "gpt2":
            raise DemoError(f"{self.path.name}: tokenizer model '{kind}' is not supported: byte-level BPE ('gpt2') is")
        if self._field("tokenizer.ggml.add_bos_token", default=False):
            raise DemoError(f"{self.path.name}: a tokenizer that adds a beginning-of-text token is not supported")
        return Vocabulary(
            tokens=tuple(self._field("tokenizer.ggml.tokens")),
            token_types=tuple(self._field("tokenizer.ggml.token_type")),
            merges=tuple(self._field("tokenizer.ggml.merges")),
            pre_tokenizer=self._field("tokenizer.ggml.pre", default="default"),
            bos_token_id=self._field("tokenizer.ggml.bos_token_id", default=None),
            eos_token_id=self._field("tokenizer.ggml.eos_token_id"),
            unk_token_id=self._field("tokenizer.ggml.unknown_token_id", default=None),
            pad_token_id=self._field("tokenizer.ggml.padding_token_id", default=None),
            chat_template=self._field("tokenizer.chat_template", default=None),
        )

    def weights(self) -> list[Weight]:
        """Every weight under the name PyTorch gives it; projections transposed to `[I, O]` as exporters fold them.

        Raises:
            DemoError: a tensor is missing, has another shape, or is none of a plain Llama's.
        """
        shape, left = self.shape, set(self._tensors)
        weights = [self._rows("token_embd.weight", "model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))]
        left.discard("token_embd.weight")
        for layer in range(shape.num_layers):
            for source, target in (_NORMS | _PROJECTIONS).items():
                gguf_name = f"blk.{layer}.{source}.weight"
                weights.append(self._layer_weight(gguf_name, source, f"model.layers.{layer}.{target}.weight"))
                left.discard(gguf_name)
        weights.append(self._rows("output_norm.weight", "model.norm.weight", (shape.hidden_size,)))
        left.discard("output_norm.weight")
        if not shape.tied_embeddings:
            weights.append(self._rows("output.weight", "lm_head.weight", (shape.vocab_size, shape.hidden_size)))
            left.discard("output.weight")
        if left:
            raise DemoError(
                f"{self.path.name}: tensor '{min(left)}' is not part of a plain Llama (biases, experts and rotary "
                "factors are not supported): use another model"
            )
        return weights

    def _read_shape(self) -> LlamaShape:
        hidden = int(self._field("llama.embedding_length"))
        heads = int(self._field("llama.attention.head_count"))
        head_size = int(self._field("llama.attention.key_length", default=hidden // heads))
        turned = int(self._field("llama.rope.dimension_count", default=head_size))
        scaling = self._field("llama.rope.scaling.type", default="none")
        if turned != head_size or scaling != "none":
            raise DemoError(f"{self.path.name}: partial or scaled rotary is not supported: use another model")
        return LlamaShape(
            num_layers=int(self._field("llama.block_count")),
            hidden_size=hidden,
            intermediate_size=int(self._field("llama.feed_forward_length")),
            num_heads=heads,
            num_kv_heads=int(self._field("llama.attention.head_count_kv", default=heads)),
            head_size=head_size,
            vocab_size=len(self._field("tokenizer.ggml.tokens")),
            context_length=int(self._field("llama.context_length")),
            rope_theta=float(self._field("llama.rope.freq_base", default=10000.0)),
            rms_norm_eps=_shortest_decimal(self._field("llama.attention.layer_norm_rms_epsilon")),
            tied_embeddings="output.weight" not in self._tensors,
        )

    def _field(self, name: str, **default: Any) -> Any:
        field = self._fields.get(name)
        if field is not None:
            return field.contents()
        if "default" in default:
            return default["default"]
        raise DemoError(f"{self.path.name}: metadata field '{name}' is missing: download the file again")

    def _layer_weight(self, gguf_name: str, source: str, name: str) -> Weight:
        shape = self.shape
        if source in _NORMS:
            return self._rows(gguf_name, name, (shape.hidden_size,))
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        rows_OI = {
            "attn_q": (queries, shape.hidden_size),
            "attn_k": (keys, shape.hidden_size),
            "attn_v": (keys, shape.hidden_size),
            "attn_output": (shape.hidden_size, queries),
            "ffn_gate": (shape.intermediate_size, shape.hidden_size),
            "ffn_up": (shape.intermediate_size, shape.hidden_size),
            "ffn_down": (shape.hidden_size, shape.intermediate_size),
        }[source]
        tensor = self._tensor(gguf_name, rows_OI)
        head_count = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(source)

        def chunks() -> Iterator[FloatArray]:
            weight_OI = _dequantise(tensor, 0, rows_OI[0])
            if head_count is not None:
                weight_OI = _undo_rotary_interleave(weight_OI, head_count)
            yield np.ascontiguousarray(weight_OI.T)

        return Weight(name=name, shape=(rows_OI[1], rows_OI[0]), chunks=chunks)

    def _rows(self, gguf_name: str, name: str, shape: tuple[int, ...]) -> Weight:
        tensor = self._tensor(gguf_name, shape)

        def chunks() -> Iterator[FloatArray]:
            for start in range(0, shape[0], _ROWS_PER_CHUNK):
                yield _dequantise(tensor, start, min(start + _ROWS_PER_CHUNK, shape[0]))

        return Weight(name=name, shape=shape, chunks=chunks)

    def _tensor(self, gguf_name: str, shape: tuple[int, ...]) -> Any:
        tensor = self._tensors.get(gguf_name)
        if tensor is None:
            raise DemoError(f"{self.path.name}: tensor '{gguf_name}' is missing: download the file again")
        found = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest axis first
        if found != shape:
            raise DemoError(f"{self.path.name}: tensor '{gguf_name}' has shape {list(found)}, expected {list(shape)}")
        return tensor


def require_gguf_package() -> None:
    """Raise DemoError, with the command that helps, when the optional package is not installed."""
    try:
        import gguf  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise DemoError("the demo needs the 'gguf' package: run pip install 'pagegraft[demo]'") from error


def _open(path: Path) -> Any:
    require_gguf_package()
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except OSError as error:
        raise DemoError(f"{path} cannot be read ({error.strerror or error}): give a GGUF file of yours") from error
    except (ValueError, IndexError) as error:
        raise DemoError(f"{path}: not a readable GGUF file ({error}): download it again") from error


def _dequantise(tensor: Any, start: int, stop: int) -> FloatArray:
    from gguf.quants import dequantize

    rows: FloatArray = dequantize(tensor.data[start:stop], tensor.tensor_type)
    return rows.astype(np.float32, copy=False)


def _undo_rotary_interleave(weight_OI: FloatArray, head_count: int) -> FloatArray:
    """Per head: rows `(x0, y0, x1, y1, ...)` to `(x0, x1, ..., y0, y1, ...)`."""
    rows, columns = weight_OI.shape
    pairs = weight_OI.reshape(head_count, rows // head_count // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _shortest_decimal(value: float) -> float:
    """The decimal that was rounded to float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
