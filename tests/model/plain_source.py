"""A source model in plain onnxruntime, fed by the names of its inputs: an oracle that shares no code with pagegraft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class PlainSource:
    """Runs one sequence at once from an empty past, without padding."""

    def __init__(self, model: Path, *, threads: int = 1, head_size: int = 16) -> None:
        """`head_size` is for exports that leave the last dimension of their caches open."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.inputs = self.session.get_inputs()
        self._head_size = head_size

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Logits `[tokens, vocab]` of one sequence."""
        feeds = {i.name: self._feed(i, tokens) for i in self.inputs}
        out: NDArray[np.float64] = self.session.run(["logits"], feeds)[0][0].astype(np.float64)
        return out

    def _feed(self, node: onnxruntime.NodeArg, tokens: Sequence[int]) -> NDArray[np.generic]:
        count = len(tokens)
        if node.name == "input_ids":
            return np.array([tokens], np.int64)
        if node.name == "attention_mask":
            return np.ones((1, count), np.int64)
        if node.name == "position_ids":
            return np.arange(count, dtype=np.int64)[None]
        if "sliding_window" in node.name:
            raise NotImplementedError(f"{node.name}: this oracle does not know what to feed")
        # A cache [batch, heads, past, head size]; what is open of it is the batch, the past and maybe the head size.
        open_sizes = (1, None, 0, self._head_size)
        sizes = [
            int(dim) if isinstance(dim, int) or dim.isdigit() else size
            for dim, size in zip(node.shape, open_sizes, strict=True)
        ]
        return np.zeros(sizes, _TYPES[node.type])


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Along the last axis, in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
