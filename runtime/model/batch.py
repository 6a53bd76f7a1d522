"""Fills a plan's feeds: packed token ids, positions, lengths, block tables and slots, by numpy over the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...custom_ops.manifest import CUMULATIVE, INPUT_IDS, LOGITS_INDICES, PAST, POSITION_IDS, CacheGroup
from ..engine.block_table import BlockTables
from ..engine.plan import StepPlan
from .runner import Feeds

__all__ = ["FeedBuilder"]


class FeedBuilder:
    """Knows the groups' input names and the tables. `block_size` is a power of two."""

    def __init__(self, groups: Sequence[CacheGroup], tables: BlockTables, block_size: int) -> None:
        self._groups = tuple(groups)
        self._tables = tables
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        self._block_size = block_size

    def fill(self, plan: StepPlan, logits_rows: NDArray[np.int32] | None = None) -> Feeds:
        """The feeds of a plan whose table updates were applied.

        `logits_rows` are the packed rows whose logits are wanted; by default the last row of each sampling entry. A
        step that wants none asks for its first row, because not every kernel takes an empty matrix.
        """
        sequences = plan.sequences
        rows = np.array([s.row for s in sequences], np.intp)
        starts = np.array(plan.starts, np.int64)
        if plan.num_tokens == len(sequences):
            ends = starts + 1
            cumulative = np.arange(len(sequences) + 1, dtype=np.int32)
            positions, token_rows = starts, rows
            ids = np.array([s.tokens[p] for s, p in zip(sequences, plan.starts, strict=True)], np.int64)
        else:
            counts = np.array(plan.counts, np.int64)
            ends = starts + counts
            cumulative = np.zeros(len(sequences) + 1, np.int32)
            np.cumsum(counts, out=cumulative[1:])
            positions = np.arange(plan.num_tokens) + np.repeat(starts - cumulative[:-1], counts)
            token_rows = np.repeat(rows, counts)
            ids = _packed_ids(plan)
        if logits_rows is None:
            logits_rows = cumulative[1:][list(plan.samples)] - 1
        feeds: dict[str, NDArray[Any]] = {
            INPUT_IDS: ids,
            POSITION_IDS: positions,
            CUMULATIVE: cumulative,
            PAST: starts.astype(np.int32),
            LOGITS_INDICES: logits_rows if logits_rows.size else np.zeros(1, np.int32),
        }
        width = (int(ends.max()) + self._mask) >> self._shift
        columns, offsets = positions >> self._shift, positions & self._mask
        for group, table in zip(self._groups, self._tables.tables, strict=True):
            feeds[group.block_table] = table[rows, :width]
            slots = table[token_rows, columns] * np.int64(self._block_size) + offsets
            feeds[group.slot_mapping] = slots.astype(np.int32)
        return feeds


def _packed_ids(plan: StepPlan) -> NDArray[np.int64]:
    ids = np.empty(plan.num_tokens, np.int64)
    at = 0
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
        if count == 1:
            ids[at] = sequence.tokens[start]
        else:
            ids[at : at + count] = np.frombuffer(sequence.tokens, np.int32, count, start * 4)
        at += count
    return ids
