"""The draw for rows with few candidates: all such rows of a step together, as one small matrix.

`n` candidates of a row, `R` such rows, `K` candidates of the row that has the most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams

__all__ = ["MAX_CANDIDATES", "Candidates", "draw_together"]

#: Above this a row is worked out on its own, so that it does not widen the matrix for all.
MAX_CANDIDATES: Final = 256


@dataclass(frozen=True, slots=True)
class Candidates:
    """What min_p and top_k leave of one row.

    ids_n: token ids, ascending. logits_n: theirs. peak: the row's largest logit. uniform: the number that draws.
    """

    ids_n: NDArray[np.int64]
    logits_n: NDArray[np.float32]
    peak: np.float32
    params: SamplingParams
    uniform: float


def draw_together(rows: Sequence[Candidates]) -> NDArray[np.int64]:
    """One token id for each row: temperature, top_p and the draw. Nothing in a row depends on the others."""
    sizes_R = np.array([row.ids_n.size for row in rows])
    filled_RK = np.arange(sizes_R.max()) < sizes_R[:, None]
    ids_RK = np.zeros(filled_RK.shape, np.int64)
    ids_RK[filled_RK] = np.concatenate([row.ids_n for row in rows])
    scaled_RK = np.full(filled_RK.shape, -np.inf, np.float32)
    scaled_RK[filled_RK] = np.concatenate([row.logits_n for row in rows])
    with np.errstate(over="ignore"):  # a mask may be the lowest float32: -inf is as good
        scaled_RK -= np.array([row.peak for row in rows])[:, None]
        scaled_RK *= np.array([1.0 / row.params.temperature for row in rows], np.float32)[:, None]

    # Largest first, the lowest id first among equal ones, because the ids ascend and the sort is stable.
    order_RK = (-scaled_RK).argsort(axis=1, kind="stable")
    weights_RK = np.exp(np.take_along_axis(scaled_RK, order_RK, axis=1))
    running_RK = weights_RK.cumsum(axis=1, dtype=np.float64)
    mass_R = np.array([row.params.top_p if row.params.top_p < 1.0 else math.inf for row in rows]) * running_RK[:, -1]
    # A token stays unless those before it reach the mass already.
    weights_RK[:, 1:][running_RK[:, :-1] >= mass_R[:, None]] = 0.0

    by_id_RK = np.empty_like(weights_RK)
    np.put_along_axis(by_id_RK, order_RK, weights_RK, axis=1)
    running_RK = by_id_RK.cumsum(axis=1, dtype=np.float64)
    # A number below 1 times the total stays below the total in float64, so every row has its first one.
    point_R = np.array([row.uniform for row in rows]) * running_RK[:, -1]
    drawn_R = (running_RK > point_R[:, None]).argmax(axis=1)
    return np.asarray(ids_RK[np.arange(len(rows)), drawn_R])
