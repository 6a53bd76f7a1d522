"""Query, key and value that come out of one product: the op takes them packed where they lie as it wants them, and
apart where they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import decoder as d
import numpy as np
import onnx
import pytest
from pagegraft.graphpass import ConvertOptions, convert

Operands = tuple[str, str, str]


def of_heads(g: d.Graph, flat: str) -> str:
    return g.op("Transpose", g.op("Reshape", flat, g.integers(0, 0, d.HEADS, d.SIZE)), perm=[0, 2, 1, 3])


def product(g: d.Graph, hidden: str) -> str:
    return g.op("Add", g.op("MatMul", hidden, g.weight(d.WIDTH, 3 * d.WIDTH)), g.weight(3 * d.WIDTH))


def split(g: d.Graph, packed: str) -> list[str]:
    names = [f"{packed}/{i}" for i in range(3)]
    g.op("Split", packed, g.integers(d.WIDTH, d.WIDTH, d.WIDTH), outputs=tuple(names), axis=2)
    return names


def in_order(g: d.Graph, hidden: str) -> Operands:
    query, key, value = (of_heads(g, x) for x in split(g, product(g, hidden)))
    return query, key, value


def by_slices(g: d.Graph, hidden: str) -> Operands:
    packed, width = product(g, hidden), d.WIDTH
    query, key, value = (
        of_heads(g, g.op("Slice", packed, g.integers(i * width), g.integers((i + 1) * width), g.integers(2)))
        for i in range(3)
    )
    return query, key, value


def by_axis(g: d.Graph, hidden: str) -> Operands:
    """`[B, S, 3, H, D]`, the three by their index."""
    parts = g.op("Reshape", product(g, hidden), g.integers(0, 0, 3, d.HEADS, d.SIZE))
    query, key, value = (
        g.op("Transpose", g.op("Gather", parts, g.scalar(i), axis=2), perm=[0, 2, 1, 3]) for i in range(3)
    )
    return query, key, value


def key_first(g: d.Graph, hidden: str) -> Operands:
    key, query, value = (of_heads(g, x) for x in split(g, product(g, hidden)))
    return query, key, value


def head_by_head(g: d.Graph, hidden: str) -> Operands:
    """`[B, S, H, 3, D]`: each head has its three behind each other."""
    parts = g.op("Reshape", product(g, hidden), g.integers(0, 0, d.HEADS, 3, d.SIZE))
    query, key, value = (
        g.op("Transpose", g.op("Gather", parts, g.scalar(i), axis=3), perm=[0, 2, 1, 3]) for i in range(3)
    )
    return query, key, value


def scaled_value(g: d.Graph, hidden: str) -> Operands:
    query, key, value = in_order(g, hidden)
    return query, key, g.op("Mul", value, g.constant(2.0, np.float32))


def bent_value(g: d.Graph, hidden: str) -> Operands:
    query, key, value = split(g, product(g, hidden))
    return of_heads(g, query), of_heads(g, key), of_heads(g, g.op("Tanh", value))


@dataclass(frozen=True, kw_only=True)
class Packed(d.Decoder):
    """A decoder with operands of a given form."""

    form: Callable[[d.Graph, str], Operands] = in_order

    def operands(self, g: d.Graph, hidden: str) -> Operands:
        return self.form(g, hidden)


def attentions(folder: Path) -> list[onnx.NodeProto]:
    return [n for n in onnx.load(folder / "model.onnx").graph.node if n.op_type == "PagedAttention"]


@pytest.mark.parametrize("rotate", [None, d.rotary], ids=["plain", "rotary"])
@pytest.mark.parametrize(
    ("form", "packed"),
    [
        (in_order, True),
        (by_slices, True),
        (by_axis, True),
        (key_first, False),
        (head_by_head, False),
        (scaled_value, True),  # the scale is taken behind the attention, which is linear in its values
        (bent_value, False),
    ],
)
def test_packed_where_it_lies_so(
    form: Callable[[d.Graph, str], Operands],
    packed: bool,
    rotate: Callable[[d.Graph, str, str, str], str] | None,
    tmp_path: Path,
) -> None:
    source = Packed(form=form, rotate=rotate).save(tmp_path / "source")
    report = convert(source, tmp_path / "out", ConvertOptions(max_positions=128))
    assert report.verification["difference"] < 1e-4
    for layer, node in zip(report.layers, attentions(tmp_path / "out"), strict=True):
        assert ("packed QKV" in layer.fused) == packed
        assert ("rotary" in layer.fused) == (rotate is not None)
        assert (list(node.input[1:3]) == ["", ""]) == packed


def test_fewer_nodes_than_without(tmp_path: Path) -> None:
    source = Packed().save(tmp_path / "source")
    counts = []
    for fuse in (True, False):
        report = convert(source, tmp_path / "out", ConvertOptions(max_positions=128, fuse=fuse))
        assert ("packed QKV" in report.layers[0].fused) == fuse
        assert all(bool(node.input[1]) != fuse for node in attentions(tmp_path / "out"))
        assert report.nodes_after is not None
        counts.append(report.nodes_after)
    assert counts[0] <= counts[1] - 2 * 3  # a Split and two Reshapes less in each layer
