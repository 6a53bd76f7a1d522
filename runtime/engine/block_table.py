"""The block tables as the op reads them: one int32 row a running sequence and group."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .plan import TableUpdate

__all__ = ["BlockTables"]


class BlockTables:
    """Maps logical blocks to block ids. Rows grow in width when a sequence needs it; stale entries are never visible.

    `tables[g]` is `[rows, width]` int32.
    """

    def __init__(self, num_groups: int, num_rows: int, *, width: int = 64) -> None:
        self.tables: list[NDArray[np.int32]] = [np.zeros((num_rows, width), np.int32) for _ in range(num_groups)]

    def apply(self, updates: Iterable[TableUpdate]) -> None:
        """Writes the changes of a plan."""
        for update in updates:
            table = self.tables[update.group]
            end = update.column + len(update.blocks)
            if end > table.shape[1]:
                wider = np.zeros((table.shape[0], max(end, 2 * table.shape[1])), np.int32)
                wider[:, : table.shape[1]] = table
                self.tables[update.group] = table = wider
            if len(update.blocks) == 1:
                table[update.row, update.column] = update.blocks[0]
            else:
                table[update.row, update.column : end] = update.blocks
