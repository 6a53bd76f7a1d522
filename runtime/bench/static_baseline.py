"""The baseline: the unconverted model in plain onnxruntime, padded static batches, no engine of ours.

Prompts of a batch are padded on the left to the longest; past tensors stay OrtValues, bound from output to input; rows
that are done leave the batch. What it costs is what a careful user of the exported model would pay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..engine.errors import ConfigurationError
from ..model.session import new_session
from .workload import BenchRequest

__all__ = ["BaselineResult", "StaticModel", "best_baseline", "find_model"]

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_IDS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """One run over a workload; tokens are output tokens."""

    batch: int
    order: str
    seconds: float
    output_tokens: int

    @property
    def tok_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Past:
    """A cache input, the output that continues it, its shape without batch and length, and the axis of the length."""

    name: str
    present: str
    shape: tuple[Any, ...]
    axis: int
    dtype: type


def find_model(source: Path) -> Path:
    """The .onnx file of a source given as file or folder. Raises ConfigurationError."""
    if source.is_file():
        return source
    for pattern in ("model.onnx", "*.onnx", "onnx/*.onnx"):
        found = sorted(source.glob(pattern))
        if found:
            return found[0]
    raise ConfigurationError(f"{source} holds no .onnx file; give the unconverted model with --source")


class StaticModel:
    """An exported decoder with input_ids, attention_mask, perhaps position_ids, and past tensors.

    Raises ConfigurationError for a model with another interface.
    """

    def __init__(self, model: Path, *, num_threads: int | None) -> None:
        self._session = new_session(model, num_threads=num_threads, with_our_op=False)
        inputs = {i.name: i for i in self._session.get_inputs()}
        outputs = [o for o in self._session.get_outputs() if o.name != "logits"]
        pasts = [i for i in inputs.values() if i.name not in (_IDS, _MASK, _POSITIONS)]
        if _IDS not in inputs or _MASK not in inputs or not pasts or len(pasts) != len(outputs):
            raise ConfigurationError(
                f"{model} has inputs {', '.join(list(inputs)[:6])}, ...: the baseline drives decoders with {_IDS}, "
                f"{_MASK} and a present for each past; run without --baseline"
            )
        self._has_positions = _POSITIONS in inputs
        by_tail = {o.name.split(".", 1)[-1]: o for o in outputs}
        self._pasts = []
        for i, past in enumerate(pasts):
            present = by_tail.get(past.name.split(".", 1)[-1], outputs[i])
            self._pasts.append(_past(past, present))

    def run(self, workload: Sequence[BenchRequest], batch: int, *, ends: frozenset[int]) -> tuple[float, int]:
        """Seconds and output tokens for all requests, `batch` at a time in the order given."""
        start, tokens = time.perf_counter(), 0
        for at in range(0, len(workload), batch):
            outputs = self.generate(
                [r.prompt for r in workload[at : at + batch]],
                [r.output_length for r in workload[at : at + batch]],
                ends=ends,
            )
            tokens += sum(map(len, outputs))
        return time.perf_counter() - start, tokens

    def generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, ends: frozenset[int]
    ) -> list[list[int]]:
        """Greedy outputs of one padded batch."""
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        past = self._empty(len(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        while True:
            logits, past = self._step(ids, mask, positions, past)
            tokens = logits.numpy()[:, -1].argmax(axis=-1)
            keep = []
            for i, row in enumerate(rows):
                outputs[row].append(int(tokens[i]))
                if len(outputs[row]) < lengths[row] and int(tokens[i]) not in ends:
                    keep.append(i)
            if not keep:
                return outputs
            if len(keep) < len(rows):
                rows = [rows[i] for i in keep]
                tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
                past = [_value(p.numpy()[keep]) for p in past]
            ids = tokens[:, None].astype(np.int64)
            mask = np.concatenate([mask, np.ones((len(rows), 1), np.int64)], axis=1)
            positions = positions[:, -1:] + 1

    def _empty(self, rows: int) -> list[onnxruntime.OrtValue]:
        values = []
        for past in self._pasts:
            shape = [rows if d is None else d for d in past.shape]
            shape[past.axis] = 0
            values.append(_value(np.zeros(shape, past.dtype)))
        return values

    def _step(
        self,
        ids: NDArray[np.int64],
        mask: NDArray[np.int64],
        positions: NDArray[np.int64],
        past: list[onnxruntime.OrtValue],
    ) -> tuple[onnxruntime.OrtValue, list[onnxruntime.OrtValue]]:
        binding = self._session.io_binding()
        small = {_IDS: _value(ids), _MASK: _value(mask)}
        if self._has_positions:
            small[_POSITIONS] = _value(positions)
        for name, value in small.items():
            binding.bind_ortvalue_input(name, value)
        for info, value in zip(self._pasts, past, strict=True):
            binding.bind_ortvalue_input(info.name, value)
        binding.bind_output("logits", "cpu")
        for info in self._pasts:
            binding.bind_output(info.present, "cpu")
        self._session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        return logits, present


def _value(array: NDArray[Any]) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _past(past: Any, present: Any) -> _Past:
    if past.type not in _TYPES or len(past.shape) < 3:
        raise ConfigurationError(f"the baseline cannot drive the cache input {past.name} of type {past.type}")
    sizes = [_number(d) for d in past.shape]
    named = [i for i, size in enumerate(sizes) if i and size is None]
    changed = [i for i in named if past.shape[i] != present.shape[i]]
    axis = (changed or named or [2])[0]
    shape = tuple(None if i == 0 else size for i, size in enumerate(sizes))
    if any(size is None for i, size in enumerate(shape) if i not in (0, axis)):
        raise ConfigurationError(f"the baseline cannot tell the size of the cache input {past.name}: {past.shape}")
    return _Past(past.name, present.name, shape, axis, _TYPES[past.type])


def _number(dimension: Any) -> int | None:
    """A dimension's size; some exporters write numbers as names."""
    if isinstance(dimension, int):
        return dimension
    return int(dimension) if isinstance(dimension, str) and dimension.isdigit() else None


def best_baseline(
    model: StaticModel, workload: Sequence[BenchRequest], batches: Sequence[int], *, ends: frozenset[int]
) -> list[BaselineResult]:
    """Runs in order of arrival with each batch size, then the best size with requests sorted by length."""
    results = []
    for batch in batches:
        results.append(BaselineResult(batch, "arrival", *model.run(workload, batch, ends=ends)))
    best = max(results, key=lambda r: r.tok_s)
    ordered = sorted(workload, key=lambda r: len(r.prompt) + r.output_length)
    results.append(BaselineResult(best.batch, "sorted by length", *model.run(ordered, best.batch, ends=ends)))
    return results
