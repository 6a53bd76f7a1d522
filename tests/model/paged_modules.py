"""Decoders that address pages of a pool inside their graph, written by hand and exported by torch.

Run as make_exports.py is: `python tests/model/paged_modules.py OUT [NAME ...]`. No released exporter that writes such
graphs was at hand; the forms follow what its authors describe: new rows scattered to the slots of a pool, the context
gathered through a table of pages. Shape letters: N pages, P tokens of a page, S slots, T new tokens, M table entries.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from export_modules import GROUPS, HEADS, SIZE, VOCAB, Decoder, GroupedHeads, half_rotary, without_stack_traces
from paged_forms import FORMS, PAGE, feeds
from torch import nn

Tensors = tuple[torch.Tensor, ...]


class Projections(GroupedHeads):
    """Query, key and value with rotary embedding; grouped heads repeated behind the cache."""

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Tensors:
        """`[1, T, H, D]`, `[1, T, G, D]`, `[1, T, G, D]`."""
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)) for f in (self.q, self.k, self.v))
        return half_rotary(q, positions), half_rotary(k, positions), v

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        """`k` and `v` `[1, K, G, D]`, of which `length` positions hold rows."""
        k, v = (t.repeat_interleave(HEADS // GROUPS, 2).transpose(1, 2) for t in (k, v))
        scores = torch.matmul(q.transpose(1, 2), k.transpose(2, 3)) / math.sqrt(SIZE)
        at = torch.arange(k.shape[2])
        seen = (at[None] <= positions.reshape(-1, 1)) & (at[None] < length.reshape(-1, 1))
        scores = scores.masked_fill(~seen[None, None], -1e9)
        mixed = torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2)
        return self.out(mixed.flatten(2))


class SlotsGiven(Projections):
    """Pools `[N, P, G, D]` seen as slots; slots are an input, pages are gathered by a table `[1, M]`."""

    def pages(self, table: torch.Tensor) -> torch.Tensor:
        """What is gathered, in this order."""
        return table[0]

    def forward(
        self, x: torch.Tensor, where: dict[str, torch.Tensor], past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The slots are those of the new tokens `[T]`."""
        positions = where["position_ids"]
        q, k, v = self.project(x, positions)
        pools = []
        for pool, rows in zip(past, (k, v), strict=True):
            flat = pool.reshape(-1, GROUPS, SIZE).index_put((where["slot_mapping"],), rows[0])
            pools.append(flat.reshape(pool.shape))
        k, v = (pool[self.pages(where["block_table"])].reshape(1, -1, GROUPS, SIZE) for pool in pools)
        return self.attend(q, k, v, positions, where["context_lens"]), pools


class SlotsComputed(Projections):
    """Pools `[S, G * D]`; slots and positions are computed from the table `[M]` and the length of the context."""

    def forward(
        self, x: torch.Tensor, where: dict[str, torch.Tensor], past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Rows are scattered by element, and gathered slot by slot."""
        table, length = where["page_table"], where["seq_len"]
        new = x.shape[1]
        positions = length - new + torch.arange(new)
        q, k, v = self.project(x, positions[None])
        slots = table[positions // PAGE] * PAGE + positions % PAGE
        context = (table[:, None] * PAGE + torch.arange(PAGE)[None]).reshape(-1)
        pools = []
        for pool, rows in zip(past, (k, v), strict=True):
            flat = rows.reshape(new, GROUPS * SIZE)
            pools.append(pool.scatter(0, slots[:, None].expand(-1, GROUPS * SIZE), flat))
        k, v = (pool[context].reshape(1, -1, GROUPS, SIZE) for pool in pools)
        return self.attend(q, k, v, positions, length), pools


class HeadsFirstPages(Projections):
    """Pools `[N, G, P, D]`; page and offset of each new token are inputs of their own, all for a batch of sequences."""

    def forward(
        self, x: torch.Tensor, where: dict[str, torch.Tensor], past: Tensors
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tables `[1, M]`, pages and offsets `[1, T]`, lengths `[1]` of past tokens."""
        positions = where["position_ids"]
        q, k, v = self.project(x, positions)
        page, offset = where["write_page"][0], where["write_offset"][0]
        pools = [
            pool.transpose(1, 2).index_put((page, offset), rows[0]).transpose(1, 2)
            for pool, rows in zip(past, (k, v), strict=True)
        ]
        k, v = (pool[where["pages"][0]].transpose(1, 2).reshape(1, -1, GROUPS, SIZE) for pool in pools)
        return self.attend(q, k, v, positions, where["past_lens"] + x.shape[1]), pools


class PagesReversed(SlotsGiven):
    """Reads the pages of a sequence in reverse order, which is no attention over its rows in order."""

    def pages(self, table: torch.Tensor) -> torch.Tensor:
        """The last page first."""
        return table[0].flip(0)


class PagedDecoder(Decoder):
    """Inputs: tokens, what says where pages are, and two pools a layer."""

    def __init__(self, attention: Callable[[], nn.Module], names: Sequence[str]) -> None:
        super().__init__(attention)
        self.names = list(names)

    def forward(self, input_ids: torch.Tensor, *rest: torch.Tensor) -> Tensors:  # type: ignore[override]
        """Logits and pools."""
        where = dict(zip(self.names, rest, strict=False))
        past = rest[len(self.names) :]
        hidden = self.embed(input_ids)
        present: list[torch.Tensor] = []
        for i, attention in enumerate(self.attention):
            mixed, pools = attention(self.norms[2 * i](hidden), where, past[2 * i : 2 * i + 2])
            hidden = hidden + mixed
            hidden = hidden + self.down[i](torch.nn.functional.silu(self.up[i](self.norms[2 * i + 1](hidden))))
            present += pools
        return (self.head(self.norms[-1](hidden)), *present)


FORMS_OF: dict[str, tuple[str, Callable[[], nn.Module], bool]] = {
    "pages_given__ts": ("given", SlotsGiven, False),
    "pages_given__dyn": ("given", SlotsGiven, True),
    "pages_computed__ts": ("computed", SlotsComputed, False),
    "pages_computed__dyn": ("computed", SlotsComputed, True),
    "pages_heads_first__ts": ("heads_first", HeadsFirstPages, False),
    "pages_heads_first__dyn": ("heads_first", HeadsFirstPages, True),
    "pages_reversed__ts": ("given", PagesReversed, False),
}


def export(name: str, file: Path) -> float:
    """Writes a model; the largest difference of its logits from torch's, as a fraction of their deviation."""
    kind, attention, dynamo = FORMS_OF[name]
    form = FORMS[kind]
    torch.manual_seed(5)
    model = PagedDecoder(attention, list(form.inputs)).eval()
    shape = form.pool_shape()
    tokens = [5, 9, 3]
    given = feeds(form, tokens, 6, [7, 2, 11])
    pools = [torch.randn(shape) for _ in range(2 * len(model.attention))]
    args = (*(torch.from_numpy(a) for a in given.values()), *pools)
    names = [f"past_key_values.{i // 2}.{('key', 'value')[i % 2]}" for i in range(len(pools))]
    presents = [n.replace("past_key_values", "present") for n in names]
    common = {"input_names": [*given, *names], "output_names": ["logits", *presents], "opset_version": 18}
    counts = {"positions": "new", "slots": "new", "page": "new", "offset": "new", "table": "entries"}
    axes: dict[str, dict[int, str]] = {"input_ids": {1: "new"}}
    for label, (rank, meaning) in form.inputs.items():
        if meaning in counts:
            axes[label] = {rank - 1: counts[meaning]}
    axes |= {n: {0: "units"} for n in (*names, *presents)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            free = torch.export.Dim.DYNAMIC
            fixed = [dict.fromkeys(axes.get(n, {}), free) for n in given]
            dims = (fixed[0], (*fixed[1:], *({0: free} for _ in pools)))
            torch.onnx.export(
                model, args, str(file), dynamo=True, dynamic_shapes=dims, external_data=False, verbose=False, **common
            )
            without_stack_traces(file)
        else:
            axes["logits"] = {1: "new"}
            torch.onnx.export(model, args, str(file), dynamo=False, dynamic_axes=axes, **common)
    onnx.checker.check_model(str(file))
    session = ort.InferenceSession(str(file))
    taken = {i.name for i in session.get_inputs()}
    every = dict(zip([*given, *names], (a.numpy() for a in args), strict=True))
    with torch.no_grad():
        expected = model(*args)[0].numpy()
    actual = session.run(["logits"], {n: a for n, a in every.items() if n in taken})[0]
    return float(np.abs(actual - expected).max() / expected.std())


def main() -> int:
    """Makes the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names or FORMS_OF:
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        off = export(name, folder / "model.onnx")
        facts = {"name": name, "difference_from_torch": off, "torch": torch.__version__, "opset": 18}
        (folder / "export.json").write_text(json.dumps(facts, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 128, "vocab_size": VOCAB}) + "\n")
        print(f"{name}: {(folder / 'model.onnx').stat().st_size} bytes, {off:.1e} off", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
