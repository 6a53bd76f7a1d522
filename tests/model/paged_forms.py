"""The interfaces of the exports that paged_modules.py makes, and such a source in plain onnxruntime: what its inputs
are fed is written here by hand and shares no code with the graph pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

GROUPS, SIZE = 2, 8
#: Tokens of a page, and how many pages the oracle's pools have.
PAGE, PAGES = 4, 40


@dataclass(frozen=True)
class Form:
    """The shape of its pools (0 at the axis that counts pages or slots), and its other inputs: rank and meaning."""

    pool: tuple[int, ...]
    inputs: dict[str, tuple[int, str]]

    def pool_shape(self) -> list[int]:
        """With as many pages or slots as the oracle's pools have."""
        return [(PAGES if PAGE in self.pool else PAGES * PAGE) if d == 0 else d for d in self.pool]


POSITIONS = ("position_ids", (2, "positions"))
GIVEN = dict([POSITIONS, ("block_table", (2, "table")), ("slot_mapping", (1, "slots")), ("context_lens", (1, "total"))])
COMPUTED = {"page_table": (1, "table"), "seq_len": (1, "total")}
BUFFER = dict([POSITIONS, ("write_indices", (1, "past")), ("nonpad_kv_seqlen", (1, "total"))])
SPLIT = dict(
    [
        POSITIONS,
        ("pages", (2, "table")),
        ("write_page", (2, "page")),
        ("write_offset", (2, "offset")),
        ("past_lens", (1, "past")),
    ]
)
FORMS: dict[str, Form] = {
    "given": Form((0, PAGE, GROUPS, SIZE), GIVEN),
    "computed": Form((0, GROUPS * SIZE), COMPUTED),
    "heads_first": Form((0, GROUPS, PAGE, SIZE), SPLIT),
    "buffer": Form((1, 128, GROUPS * SIZE), BUFFER),
}


def feeds(form: Form, tokens: Sequence[int], past: int, table: Sequence[int]) -> dict[str, NDArray[np.int64]]:
    """What the inputs that are no pools are fed for one sequence."""
    new = len(tokens)
    positions = np.arange(past, past + new)
    pages = np.asarray(table)
    meaning = {
        "positions": positions,
        "table": pages,
        "slots": pages[positions // PAGE] * PAGE + positions % PAGE,
        "page": pages[positions // PAGE],
        "offset": positions % PAGE,
        "total": np.array([past + new]),
        "past": np.array([past]),
    }
    found = {name: meaning[m].reshape((1,) * (rank - 1) + (-1,)) for name, (rank, m) in form.inputs.items()}
    return {"input_ids": np.asarray([tokens]), **{name: a.astype(np.int64) for name, a in found.items()}}


class PagedSource:
    """A source in plain onnxruntime, run through its own tables with pools full of garbage."""

    def __init__(self, model: Path, form: Form, seed: int = 3) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        self.session = ort.InferenceSession(str(model), options)
        self.form = form
        self.rng = np.random.default_rng(seed)
        shape = form.pool_shape()
        names = [i.name for i in self.session.get_inputs() if i.type == "tensor(float)"]
        self.pools = {name: (self.rng.standard_normal(shape) * 20).astype(np.float32) for name in names}

    def logits(self, tokens: Sequence[int], *, step: int = 5) -> NDArray[np.float64]:
        """`[tokens, vocab]`, `step` tokens at a time."""
        table = self.rng.permutation(PAGES)
        parts = []
        for past in range(0, len(tokens), step):
            piece = tokens[past : past + step]
            entries = -(-(past + len(piece)) // PAGE)
            given = feeds(self.form, piece, past, table[:entries])
            taken = {i.name for i in self.session.get_inputs()}
            given = {name: a for name, a in given.items() if name in taken}
            logits, *pools = self.session.run(None, {**given, **self.pools})
            self.pools = dict(zip(self.pools, pools, strict=True))
            parts.append(logits[0].astype(np.float64))
        return np.concatenate(parts)
