"""What `long_context` asks of the model of `needle_model`, and that model in plain onnxruntime: the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx.utils
import onnxruntime
from numpy.typing import NDArray

from tests.performance.needle_model import HEAD_SIZE, VOCAB

__all__ = ["NEEDLES", "NEEDLE_LENGTH", "Context", "Source", "log_softmax", "make_context"]

#: A needle is a token to ask with and what follows it.
NEEDLES, NEEDLE_LENGTH = 5, 5


@dataclass(frozen=True)
class Context:
    """Random tokens with needles in them; each needle's tokens stand nowhere else."""

    tokens: list[int]
    needles: list[list[int]]


def make_context(length: int, seed: int = 0) -> Context:
    """Needles at the start, at 25, 50 and 75 % and at the end."""
    rng = np.random.default_rng(seed)
    count = NEEDLES * NEEDLE_LENGTH
    special = rng.permutation(VOCAB)
    needles = special[:count].reshape(NEEDLES, NEEDLE_LENGTH).tolist()
    tokens = rng.choice(special[count:], length)
    for i, needle in enumerate(needles):
        at = min(max(3, length * i // (NEEDLES - 1)), length - NEEDLE_LENGTH - 3)
        tokens[at : at + NEEDLE_LENGTH] = needle
    return Context(tokens.tolist(), needles)


class Source:
    """The unconverted model in plain onnxruntime, one sequence in chunks with its past.

    Chunks whose logits nobody reads run the part of the graph that the caches come from.
    """

    def __init__(self, folder: Path) -> None:
        whole, part = folder / "model.onnx", folder / "caches.onnx"
        model = onnx.load(whole)
        self._inputs = [i.name for i in model.graph.input]
        names = [name for name in self._inputs if name.startswith("past")]
        presents = [o.name for o in model.graph.output if o.name != "logits"]
        onnx.utils.extract_model(str(whole), str(part), self._inputs, presents)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._whole, self._part = (onnxruntime.InferenceSession(str(file), options) for file in (whole, part))
        self.past = {name: np.zeros((1, 1, 0, HEAD_SIZE), np.float32) for name in names}

    def logits(self, tokens: Sequence[int], past: dict[str, NDArray[np.float32]]) -> NDArray[np.float64]:
        """`[tokens, vocab]` behind a past."""
        out: NDArray[np.float32] = self._whole.run(["logits"], self._feeds(tokens, past))[0][0]
        return out.astype(np.float64)

    def read(self, tokens: Sequence[int], chunk: int = 256) -> None:
        """Makes `tokens` the past."""
        for start in range(0, len(tokens), chunk):
            feeds = self._feeds(tokens[start : start + chunk], self.past)
            taken = {i.name for i in self._part.get_inputs()}
            present = self._part.run(None, {name: array for name, array in feeds.items() if name in taken})
            self.past = dict(zip(self.past, present, strict=True))

    def _feeds(self, tokens: Sequence[int], past: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
        done = next(iter(past.values())).shape[2]
        end = done + len(tokens)
        positions = np.arange(done, end, dtype=np.int64)[None]
        values = (np.array([tokens], np.int64), np.ones((1, end), np.int64), positions, *past.values())
        return dict(zip(self._inputs, values, strict=True))

    def past_without(self, start: int, end: int) -> dict[str, NDArray[np.float32]]:
        """The past with some of its tokens' keys and values set to zero."""
        out = {name: array.copy() for name, array in self.past.items()}
        for array in out.values():
            array[:, :, start:end] = 0
        return out


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
