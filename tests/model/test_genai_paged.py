"""A model that another project built around com.microsoft::PagedAttention (float16) runs on our CPU kernel.

`llama_gqa__genaipaged` and `llama_gqa__genai` is one tiny model, built twice by onnxruntime-genai: with the paged op
and with GroupQueryAttention in float32. Every node of the paged model but the attention is a CPU kernel of onnxruntime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from pagegraft.custom_ops import register

ZOO = Path(__file__).parents[1] / "data" / "zoo"
BLOCK_SIZE, BLOCKS, LAYERS, KV_HEADS, HEAD = 8, 40, 2, 2, 16
VOCABULARY = 256
Array = np.ndarray[Any, Any]


def _session(name: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    register(options)
    return onnxruntime.InferenceSession(ZOO / name / "model.onnx", options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def sibling() -> onnxruntime.InferenceSession:
    return _session("llama_gqa__genai")


def _sibling_logits(session: onnxruntime.InferenceSession, tokens: Array) -> Array:
    """Logits of every position, [n, vocabulary], from one run without past."""
    feeds = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for layer in range(LAYERS):
        for part in ("key", "value"):
            feeds[f"past_key_values.{layer}.{part}"] = np.zeros((1, KV_HEADS, 0, HEAD), np.float32)
    return session.run(["logits"], feeds)[0][0]


class _Paged:
    """The paged model with its caches, stepped with any mixture of sequences."""

    def __init__(self, sequences: int) -> None:
        self.session = _session("llama_gqa__genaipaged")
        self.past = np.zeros(sequences, np.int32)
        width = BLOCKS // sequences
        self.table = np.random.default_rng(5).permutation(width * sequences).reshape(sequences, width).astype(np.int32)
        nan = np.full((BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD), np.nan, np.float16)
        self.caches = {
            f"past_key_values.{layer}.{part}": onnxruntime.OrtValue.ortvalue_from_numpy(nan.copy())
            for layer in range(LAYERS)
            for part in ("key", "value")
        }

    def step(self, chunks: dict[int, Array]) -> dict[int, Array]:
        """Computes these new tokens of these sequences; returns the logits of each token."""
        rows, new = sorted(chunks), [len(chunks[s]) for s in sorted(chunks)]
        small = {
            "input_ids": np.concatenate([chunks[s] for s in rows]),
            "block_table": self.table[rows],
            "cumulative_sequence_lengths": np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            "past_sequence_lengths": self.past[rows],
            "attention_metadata": np.array([max(new), int((self.past[rows] + new).max()), 0], np.int32),
            "logits_indices": np.arange(sum(new), dtype=np.int32),
        }
        binding = self.session.io_binding()
        for name, array in small.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, value in self.caches.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        names = [o.name for o in self.session.get_outputs()]
        bound = [n.replace("past_key_values", "present") for n in self.caches] + ["logits"]
        assert set(bound) == set(names)
        logits = binding.get_outputs()[bound.index("logits")].numpy()
        self.past[rows] += np.array(new, np.int32)
        return dict(zip(rows, np.split(logits, np.cumsum(new)[:-1]), strict=True))


def test_the_attention_is_the_only_node_that_is_ours() -> None:
    """onnxruntime's CPU has every other node of the model: the session could not be made otherwise."""
    graph = onnx.load(ZOO / "llama_gqa__genaipaged" / "model.onnx", load_external_data=False).graph
    paged = [n for n in graph.node if n.op_type == "PagedAttention"]
    assert len(paged) == LAYERS
    assert {n.domain for n in paged} == {"com.microsoft"}
    plain = onnxruntime.SessionOptions()
    plain.log_severity_level = 4
    with pytest.raises(Exception, match="PagedAttention"):
        onnxruntime.InferenceSession(
            ZOO / "llama_gqa__genaipaged" / "model.onnx", plain, providers=["CPUExecutionProvider"]
        )


def test_it_gives_what_its_sibling_gives(sibling: onnxruntime.InferenceSession) -> None:
    """Three sequences in mixed steps, prefill in chunks, then token by token; the unused cache holds NaN."""
    rng = np.random.default_rng(11)
    lengths = (37, 5, 22)
    tokens = [rng.integers(0, VOCABULARY, n) for n in lengths]
    model, done, got = _Paged(len(tokens)), [0] * len(tokens), [[] for _ in tokens]
    for chunk in ((13, 2, 0), (1, 1, 9), (9, 0, 1), (1, 1, 10), (6, 1, 1), (7, 0, 1)):
        part = {s: tokens[s][done[s] : done[s] + n] for s, n in enumerate(chunk) if n}
        for s, logits in model.step(part).items():
            got[s].append(logits)
            done[s] += len(logits)
    assert done == list(lengths)
    for ids, rows in zip(tokens, got, strict=True):
        want = _sibling_logits(sibling, ids)
        ours = np.concatenate(rows).astype(np.float32)
        alone = np.concatenate([_sibling_logits(sibling, ids[i : i + 1]) for i in range(len(ids))])
        error, context = np.abs(ours - want), np.abs(alone - want)[1:]
        assert np.isfinite(ours).all()
        assert error.max() < 0.02 * want.std()
        assert error.mean() < 0.02 * context.mean(), "not distinguishable from a model that sees no context"
        sure = np.sort(want, axis=1)[:, -1] - np.sort(want, axis=1)[:, -2] > 2 * error.max()
        assert sure.mean() > 0.8
        np.testing.assert_array_equal(ours.argmax(1)[sure], want.argmax(1)[sure])
