"""Drives a converted model and its source without an engine: packed feeds by hand, one sequence at a time for the
source. Verification and the model tests use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
from pagegraft import custom_ops
from pagegraft.custom_ops import manifest as names

from .cache_storage import poisoned_caches
from .errors import VerificationError
from .evaluate import Array, element_type, first_line, session_options
from .source_session import SourceSession, numpy_type

__all__ = ["PackedModel", "SourceModel"]


@dataclass
class _Sequence:
    tokens: int = 0
    offset: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)


class PackedModel:
    """A converted model with a block pool of its own: `step` runs any mix of sequences.

    Blocks are handed out in a shuffled order and start out as NaN, so that a wrong table, slot or mask shows; a
    windowed group's table entries left of every window are unmapped. Caches are bound to input and output alike, as
    the runtime does it.
    """

    def __init__(
        self,
        model: Path,
        manifest: names.Manifest,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        threads: int = 1,
        exposed: Sequence[str] = (),
    ) -> None:
        """`threads` 0 is one a core. `exposed` are further outputs of the graph, kept in `last_exposed` by a step.

        Raises VerificationError when onnxruntime cannot load the model.
        """
        self._exposed = tuple(exposed)
        self.last_exposed: dict[str, Array] = {}
        options = session_options(optimise=True, threads=threads)
        custom_ops.register(options)
        try:
            self.session = ort.InferenceSession(str(model), options)
        except Exception as error:  # onnxruntime raises untyped exceptions
            raise VerificationError(f"the converted model does not load in onnxruntime: {first_line(error)}") from None
        self.manifest = manifest
        self.block_size = block_size
        self._sequences: dict[int, _Sequence] = {}
        rng = np.random.default_rng(3)
        self._free = [list(map(int, rng.permutation(num_blocks))) for _ in manifest.groups]
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self._binding = self.session.io_binding()
        self._caches = poisoned_caches(manifest, num_blocks, block_size)
        # A binding does not keep numpy's memory alive, nor do the values: `_caches` does.
        for name, array in self._caches.items():
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type(array))
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Array]:
        """Computes the next tokens of each (sequence id, tokens). Returns each one's logits `[tokens, vocab]`.

        Raises VerificationError when the model fails.
        """
        feeds = self._feeds(work)
        for name, array in feeds.items():
            self._binding.bind_cpu_input(name, array)
        for name in (*self._exposed, names.LOGITS):
            self._binding.bind_output(name)
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises untyped exceptions
            raise VerificationError(f"the converted model fails on a step: {first_line(error)}") from None
        found = self._binding.get_outputs()[len(self._caches) :]  # in the order of binding
        *exposed, logits = (value.numpy() for value in found)
        self.last_exposed = dict(zip(self._exposed, exposed, strict=True))
        for sequence, tokens in work:
            self._sequences[sequence].tokens += len(tokens)
        ends = np.cumsum([len(tokens) for _, tokens in work])
        return [np.asarray(part) for part in np.split(logits, ends[:-1])]

    def place(self, sequence: int, offset: int) -> None:
        """Lets a new sequence's position ids begin at `offset`; graphs that count from the past lengths ignore it."""
        self._sequences[sequence] = _Sequence(offset=offset)

    def stored(self, layer: int, part: str, sequence: int) -> Array:
        """What a sequence has in a layer's "key" or "value" cache, as stored: `[tokens, G, W]`."""
        state = self._sequences[sequence]
        slots = self._slots(state, np.arange(state.tokens), self.manifest.layers[layer].group)
        cache = self._caches[names.cache_name(layer, part)]
        return np.asarray(cache.reshape(-1, *cache.shape[2:])[slots])

    def _feeds(self, work: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Array]:
        states = [self._sequences.setdefault(s, _Sequence()) for s, _ in work]
        lengths = [len(tokens) for _, tokens in work]
        positions = [np.arange(s.tokens, s.tokens + n) for s, n in zip(states, lengths, strict=True)]
        feeds: dict[str, Array] = {
            names.INPUT_IDS: np.concatenate([np.asarray(t, np.int64) for _, t in work]),
            names.POSITION_IDS: np.concatenate([p + s.offset for p, s in zip(positions, states, strict=True)]).astype(
                np.int64
            ),
            names.CUMULATIVE: np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            names.PAST: np.array([s.tokens for s in states], np.int32),
            names.LOGITS_INDICES: np.arange(sum(lengths), dtype=np.int32),
        }
        for index, group in enumerate(self.manifest.groups):
            for state, count in zip(states, lengths, strict=True):
                self._grow(state, index, state.tokens + count)
            feeds[group.block_table] = self._table(states, lengths, index)
            feeds[group.slot_mapping] = np.concatenate(
                [self._slots(s, p, index) for s, p in zip(states, positions, strict=True)]
            ).astype(np.int32)
        if "attention_metadata" in self.inputs:
            reach = [s.tokens + n for s, n in zip(states, lengths, strict=True)]
            feeds["attention_metadata"] = np.array([max(lengths), max(reach), max(reach)], np.int32)
        return {name: array for name, array in feeds.items() if name in self.inputs}

    def _grow(self, state: _Sequence, group: int, tokens: int) -> None:
        blocks = state.blocks.setdefault(group, [])
        while len(blocks) * self.block_size < tokens:
            blocks.append(self._free[group].pop())

    def _table(self, states: Sequence[_Sequence], lengths: Sequence[int], index: int) -> Array:
        width = max(len(s.blocks[index]) for s in states)
        table = np.full((len(states), width), -1, np.int32)
        window = self.manifest.groups[index].window
        for row, state in enumerate(states):
            blocks = state.blocks[index]
            table[row, : len(blocks)] = blocks
            if window is not None:
                unseen = max(0, state.tokens - window + 1) // self.block_size
                table[row, :unseen] = -1
        return table

    def _slots(self, state: _Sequence, positions: Array, group: int) -> Array:
        blocks = np.asarray(state.blocks[group])
        return np.asarray(blocks[positions // self.block_size] * self.block_size + positions % self.block_size)


class SourceModel:
    """A source model in plain onnxruntime, one sequence at a time."""

    def __init__(
        self,
        model: Path,
        cache_shapes: Mapping[str, tuple[int | None, ...]],
        presents: Mapping[str, str],
        *,
        capacities: Mapping[str, int] | None = None,
        single_token: bool = False,
        replaced: Mapping[str, Array] | None = None,
    ) -> None:
        """`cache_shapes`: per cache input, None at the axis of tokens. `presents`: cache input -> output.

        `capacities`: entries that an empty cache must have room for, where that is not zero. `single_token`: the
        source is right for steps of one token only. `replaced`: initialisers by name that take the place of the file's.

        Raises VerificationError when onnxruntime cannot load it.
        """
        self._capacities = capacities or {}
        self._step = 1 if single_token else None
        self._session = SourceSession(model, replaced=replaced)
        self._shapes = cache_shapes
        self._presents = presents

    def logits(self, tokens: Sequence[int], *, chunk: int | None = None) -> Array:
        """Teacher-forced logits `[tokens, vocab]` of one sequence, run at once or `chunk` tokens at a time.

        Raises VerificationError when the source itself fails.
        """
        caches = self._empty()
        step = self._step or chunk or len(tokens)
        parts: list[Array] = []
        for start in range(0, len(tokens), step):
            piece = tokens[start : start + step]
            last = start + step >= len(tokens)
            wanted = [self._session.logits, *([] if last else self._presents.values())]
            feeds = self._feeds(piece, start, caches)
            results = self._session.run(wanted, feeds, new=len(piece), past=start)
            parts.append(results[0].reshape(len(piece), -1))
            if not last:
                caches = dict(zip(self._presents, results[1:], strict=True))
        return np.concatenate(parts)

    def _empty(self) -> dict[str, Array]:
        return {
            name: np.zeros(
                [self._capacities.get(name, 0) if d is None else d for d in shape],
                numpy_type(self._session.inputs[name].type),
            )
            for name, shape in self._shapes.items()
        }

    def _feeds(self, tokens: Sequence[int], past: int, caches: Mapping[str, Array]) -> dict[str, Array]:
        feeds: dict[str, Array] = dict(caches)
        new = len(tokens)
        for name, info in self._session.inputs.items():
            if name in feeds:
                continue
            kind = numpy_type(info.type)
            rank = len(info.shape)
            if "mask" in name:
                feeds[name] = np.ones((1, past + new), kind)
            elif "position" in name:
                feeds[name] = np.arange(past, past + new, dtype=kind).reshape((1,) * (rank - 1) + (new,))
            elif kind == np.bool_:
                feeds[name] = np.array([True])
            elif rank <= 1:
                feeds[name] = np.full([d if isinstance(d, int) else 1 for d in info.shape], past, kind)
            else:
                feeds[name] = np.asarray(tokens, kind)[None]
        return feeds
