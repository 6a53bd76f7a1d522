"""A paged ONNX model whose next token everybody can work out: it checks the wiring between engine and model.

The model has the interface of a converted one and no PagedAttention op. Each layer's key cache keeps token ids; the
next token is a checksum, over the positions that the layer may see, of token and position as read back through the
block table:

    next(p) = (sum over layers l of (l + 1) * sum over visible j <= p of (j + 1) * (3 * token[j] + j + 2)) mod vocab

A wrong slot, table, length, position or window gives another token. Logits fall off with the distance from the next
token, so that sampling has something to choose from.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from pagegraft.custom_ops.manifest import (
    CacheGroup,
    CacheLayer,
    Manifest,
    block_table_name,
    cache_name,
    file_digest,
    slot_mapping_name,
)

VOCAB = 61
EOS = 7


def next_token(tokens: Sequence[int], windows: Sequence[int | None] = (None,), vocab: int = VOCAB) -> int:
    """The token that follows `tokens`; the oracle, in plain Python."""
    total, last = 0, len(tokens) - 1
    for layer, window in enumerate(windows):
        first = 0 if window is None else max(0, last - window + 1)
        total += (layer + 1) * sum((j + 1) * (3 * tokens[j] + j + 2) for j in range(first, last + 1))
    return total % vocab


def next_logits(
    tokens: Sequence[int], windows: Sequence[int | None] = (None,), vocab: int = VOCAB
) -> NDArray[np.float64]:
    """The logits after `tokens`: a steeper fall for larger tokens, so that hardly any two sums are equal."""
    following = next_token(tokens, windows, vocab)
    return -(0.7 + 0.003 * following) * ((np.arange(vocab) - following) % vocab)


def continuation(
    prompt: Sequence[int],
    count: int,
    windows: Sequence[int | None] = (None,),
    *,
    eos: int | None = None,
    vocab: int = VOCAB,
) -> list[int]:
    """The greedy continuation of a prompt, up to `count` tokens or with `eos` as its last."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens, windows, vocab))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def pieces() -> list[str]:
    """The spelling of each token of `add_text`: letters, then pairs of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [*letters, *(a + b for a, b in itertools.islice(itertools.product("zyx", letters), VOCAB - 26))]


def spell(tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(pieces()[token] for token in tokens)


def letters(text: str) -> list[int]:
    """The tokens that the tokenizer makes of a text: one a letter, because it has no merges."""
    return [pieces().index(letter) for letter in text]


#: First letter of the role and content of each message, "t" when there are tools, then "a".
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}a"


def add_text(folder: Path) -> Path:
    """Gives a model a tokenizer and a chat template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces())}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


class _Graph:
    """Collects nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._count = 0

    def op(self, op_type: str, *inputs: str, out: str | None = None, **attributes: object) -> str:
        self._count += 1
        name = out or f"v{self._count}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def const(self, value: object, dtype: type = np.int64) -> str:
        self._count += 1
        name = f"c{self._count}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name


def build(folder: Path, windows: Sequence[int | None] = (None,), *, block_size: int = 4, **facts: object) -> Path:
    """Writes the model, one layer a cache group with the given windows; `facts` go into the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = int(facts.get("vocab_size", VOCAB))  # type: ignore[call-overload]
    g = _Graph()
    tokens_f = g.op("Cast", "input_ids", to=TensorProto.FLOAT)
    cumulative = g.op("Cast", "cumulative_sequence_lengths", to=TensorProto.INT64)
    past = g.op("Cast", "past_sequence_lengths", to=TensorProto.INT64)
    starts = g.op("Slice", cumulative, g.const([0]), g.const([-1]))
    ends = g.op("Slice", cumulative, g.const([1]), g.const([1 << 40]))
    count = g.op("Squeeze", g.op("Shape", "input_ids"))
    rows = g.op("Range", g.const(0), count, g.const(1))
    behind = g.op("GreaterOrEqual", g.op("Unsqueeze", rows, g.const([1])), g.op("Unsqueeze", ends, g.const([0])))
    sequence = g.op("ReduceSum", g.op("Cast", behind, to=TensorProto.INT64), g.const([1]), keepdims=0)
    position = g.op("Add", g.op("Gather", past, sequence), g.op("Sub", rows, g.op("Gather", starts, sequence)))
    # Zero unless the fed positions disagree with the lengths.
    total = g.op("Mul", g.op("Sub", "position_ids", position), g.const(13))
    for layer, window in enumerate(windows):
        seen = _layer(g, layer, window, tokens_f, sequence, position)
        total = g.op("Add", total, g.op("Mul", seen, g.const(layer + 1)))
    following = g.op("Gather", g.op("Mod", total, g.const(vocab)), g.op("Cast", "logits_indices", to=TensorProto.INT64))
    distance = g.op("Sub", g.const(np.arange(vocab)[None, :]), g.op("Unsqueeze", following, g.const([1])))
    distance = g.op("Cast", g.op("Mod", distance, g.const(vocab)), to=TensorProto.FLOAT)
    slope = g.op("Mul", g.op("Cast", following, to=TensorProto.FLOAT), g.const(-0.003, np.float32))
    slope = g.op("Unsqueeze", g.op("Add", slope, g.const(-0.7, np.float32)), g.const([1]))
    g.op("Mul", distance, slope, out="logits")
    model = folder / "model.onnx"
    onnx.save(_model(g, windows, vocab), model)
    _manifest(model, windows, block_size, facts).save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "do_sample": False}))
    return folder


def _names(windows: Sequence[int | None]) -> list[tuple[str, str]]:
    return [(block_table_name(i), slot_mapping_name(i)) for i in range(len(windows))]


def _layer(g: _Graph, layer: int, window: int | None, tokens_f: str, sequence: str, position: str) -> str:
    """Writes the step's tokens into a layer's cache and returns each packed token's checksum [T]."""
    table, slot_mapping = block_table_name(layer), slot_mapping_name(layer)
    cache = cache_name(layer, "key")
    flat = g.op("Reshape", cache, g.const([-1, 1]))
    slots = g.op("Unsqueeze", g.op("Cast", slot_mapping, to=TensorProto.INT64), g.const([1]))
    written = g.op("ScatterND", flat, slots, g.op("Unsqueeze", tokens_f, g.const([1])))
    present = g.op("Reshape", written, g.op("Shape", cache), out=cache_name(layer, "key", present=True))
    blocks = g.op("Gather", g.op("Squeeze", present, g.const([2, 3])), table)  # [S, M, B]
    context = g.op("Cast", g.op("Reshape", blocks, g.const([0, -1])), to=TensorProto.INT64)  # [S, M*B]
    mine = g.op("Gather", context, sequence)  # [T, M*B]
    places = g.op("Unsqueeze", g.op("Range", g.const(0), _size(g, context), g.const(1)), g.const([0]))
    own = g.op("Unsqueeze", position, g.const([1]))
    visible = g.op("LessOrEqual", places, own)
    if window is not None:
        visible = g.op("And", visible, g.op("Greater", places, g.op("Sub", own, g.const(window))))
    weight = g.op("Add", places, g.const(1))
    term = g.op("Mul", weight, g.op("Add", g.op("Mul", mine, g.const(3)), g.op("Add", weight, g.const(1))))
    return g.op("ReduceSum", g.op("Where", visible, term, g.const(0)), g.const([1]), keepdims=0)


def _size(g: _Graph, matrix: str) -> str:
    return g.op("Squeeze", g.op("Slice", g.op("Shape", matrix), g.const([1]), g.const([2])))


def _model(g: _Graph, windows: Sequence[int | None], vocab: int) -> onnx.ModelProto:
    def info(name: str, dtype: int, shape: list[str | int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    inputs = [info("input_ids", TensorProto.INT64, ["T"]), info("position_ids", TensorProto.INT64, ["T"])]
    inputs.append(info("cumulative_sequence_lengths", TensorProto.INT32, ["S1"]))
    inputs.append(info("past_sequence_lengths", TensorProto.INT32, ["S"]))
    inputs.append(info("logits_indices", TensorProto.INT32, ["R"]))
    outputs = [info("logits", TensorProto.FLOAT, ["R", vocab])]
    for layer, (table, slots) in enumerate(_names(windows)):
        inputs += [info(table, TensorProto.INT32, ["S", "M"]), info(slots, TensorProto.INT32, ["T"])]
        shape: list[str | int] = [f"N{layer}", "B", 1, 1]
        for present in (False, True):
            name = cache_name(layer, "key", present=present)
            (outputs if present else inputs).append(info(name, TensorProto.FLOAT, shape))
    graph = helper.make_graph(g.nodes, "synthetic", inputs, outputs, g.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def _manifest(model: Path, windows: Sequence[int | None], block_size: int, facts: dict[str, object]) -> Manifest:
    groups, layers = [], []
    for i, (window, (table, slots)) in enumerate(zip(windows, _names(windows), strict=True)):
        groups.append(CacheGroup(window=window, layers=(i,), block_table=table, slot_mapping=slots))
        layers.append(
            CacheLayer(
                group=i,
                kv_heads=1,
                key_head_size=1,
                value_head_size=None,
                key_dtype="float32",
                value_dtype=None,
            )
        )
    values: dict[str, object] = {
        "model_file": model.name,
        "graph_digest": file_digest(model),
        "groups": tuple(groups),
        "layers": tuple(layers),
        "positions": "position_ids",
        "vocab_size": VOCAB,
        "compute_dtype": "float32",
        "max_positions": 4096,
        "default_block_size": block_size,
        **facts,
    }
    return Manifest(**values)  # type: ignore[arg-type]
