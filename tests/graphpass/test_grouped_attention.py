"""com.microsoft's GroupQueryAttention nodes: what the op can say too is taken over, everything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoder as d
import numpy as np
import pytest
from fused_decoder import Layer, build, save
from onnx import TensorProto, helper
from pagegraft.graphpass import ConvertOptions, NotConvertible, convert, inspect

OPTIONS = ConvertOptions(max_positions=128)
SIZE = d.SIZE
More = Callable[[d.Graph, d.Ranges], dict[str, str]]
_PLACES = {"cos": 7, "sin": 8, "positions": 9, "bias": 10, "sink": 11, "q_norm": 14, "k_norm": 15}


def nothing(_: d.Graph, __: d.Ranges) -> dict[str, str]:
    return {}


def grouped(more: More = nothing, *, groups: int = 2, late: int = 0, past: bool = True, **attributes: Any) -> Layer:
    """A node over `groups` key/value heads; `late` is added to the lengths that it is told."""

    def layer(g: d.Graph, hidden: str, index: int, r: d.Ranges) -> str:
        operands = [g.op("MatMul", hidden, g.weight(d.WIDTH, n * SIZE)) for n in (d.HEADS, groups, groups)]
        total = g.op("Cast", r.total, to=TensorProto.INT32)
        lengths = g.op("Sub", g.op("Reshape", total, g.integers(1)), g.constant([1 - late], np.int32))
        caches = [f"past.{index}.{part}" if past else "" for part in ("key", "value")]
        inputs = [*operands, *caches, lengths, total, *[""] * 9]
        for name, value in more(g, r).items():
            inputs[_PLACES[name]] = value
        while not inputs[-1]:
            inputs.pop()
        names = (f"y{index}", f"present.{index}.key", f"present.{index}.value")
        kinds = {"domain": "com.microsoft", "num_heads": d.HEADS, "kv_num_heads": groups}
        return g.op("GroupQueryAttention", *inputs, outputs=names, **kinds, **attributes)

    return layer


def tables(g: d.Graph, _: d.Ranges) -> dict[str, str]:
    angles = np.arange(128)[:, None] / 100.0 ** (np.arange(8) / 8)
    return {"cos": g.constant(np.cos(angles), np.float32), "sin": g.constant(np.sin(angles), np.float32)}


def tables_by_length(g: d.Graph, r: d.Ranges) -> dict[str, str]:
    """Other tables once any sequence of the batch is long."""
    long = g.op("Greater", r.total, g.scalar(40))
    return {
        name: g.op("Where", long, value, g.op("Mul", value, g.constant(0.5, np.float32)))
        for name, value in tables(g, r).items()
    }


def sinks(g: d.Graph, _: d.Ranges) -> dict[str, str]:
    return {"sink": g.constant([0.5, -1.0, 2.0, 0.0], np.float32)}


def bias(g: d.Graph, r: d.Ranges) -> dict[str, str]:
    distance = g.op("Cast", g.op("Sub", r.key, r.query), to=TensorProto.FLOAT)
    return {"bias": g.op("Unsqueeze", distance, g.integers(0, 1))}


CASES: dict[str, tuple[Layer, str]] = {
    "plain": (grouped(), "causal"),
    "window": (grouped(local_window_size=6), "window 6"),
    "softcap and scale": (grouped(softcap=3.0, scale=0.5), "causal"),
    "sinks": (grouped(sinks), "causal"),
    "one group": (grouped(groups=1), "causal"),
}


def sized(layer: Layer, groups: int = 2) -> Any:
    """The model, with caches of the node's own number of heads."""
    model = build(layer)
    for value in (*model.graph.input, *model.graph.output):
        if "key" in value.name or "value" in value.name:
            value.type.tensor_type.shape.dim[1].dim_value = groups
    return model


@pytest.mark.parametrize("name", CASES)
def test_converts_and_equals_its_source(name: str, tmp_path: Path) -> None:
    layer, mask = CASES[name]
    source = save(sized(layer, 1 if name == "one group" else 2), tmp_path / "source")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.verification["difference"] < 1e-4
    assert [x.mask for x in report.layers] == [mask] * 2
    assert [x.kv_heads for x in report.layers] == [1 if name == "one group" else 2] * 2


REFUSED: dict[str, tuple[Layer, str, str]] = {
    "bias": (grouped(bias), "fused", "attention_bias"),
    "both ways": (grouped(causal=0), "mask", "not causal"),
    "lengths of something else": (grouped(late=1), "fused", "seqlens_k"),
    "tables by length": (grouped(tables_by_length, do_rotary=1), "batch-global", "length of the whole batch"),
    "a window beyond 32 bits": (grouped(local_window_size=1 << 40), "mask", "window of 1099511627776"),
    "a window of nothing": (grouped(local_window_size=0), "mask", "window of 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_node_and_hint(name: str, tmp_path: Path) -> None:
    layer, kind, words = REFUSED[name]
    source = save(sized(layer), tmp_path / "source")
    with pytest.raises(NotConvertible, match=words) as caught:
        convert(source, tmp_path / "out", OPTIONS)
    assert (caught.value.kind, bool(caught.value.node), bool(caught.value.hint)) == (kind, True, True)
    assert not (tmp_path / "out").exists()


def test_a_wide_window_is_read_without_running_all_of_it(tmp_path: Path) -> None:
    source = save(sized(grouped(local_window_size=1 << 30)), tmp_path / "source")
    assert [x.mask for x in inspect(source, OPTIONS).layers] == [f"window {1 << 30}"] * 2


@pytest.mark.parametrize("name", ["num_heads", "kv_num_heads"])
@pytest.mark.parametrize("number", [None, 0, 3])
def test_heads_that_are_not_stated_or_do_not_fit(name: str, number: int | None, tmp_path: Path) -> None:
    model = sized(grouped())
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            (attribute,) = [a for a in node.attribute if a.name == name]
            node.attribute.remove(attribute)
            if number is not None:
                node.attribute.append(helper.make_attribute(name, number))
    source = save(model, tmp_path / "source")
    with pytest.raises(NotConvertible) as caught:
        convert(source, tmp_path / "out", ConvertOptions(max_positions=128, verify=False))
    assert caught.value.kind in ("fused", "broken-source")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_source_that_its_own_kernel_refuses_is_called_broken(tmp_path: Path) -> None:
    """Rotary tables wider than a head, which onnxruntime loads and does not run."""
    source = save(sized(grouped(tables, do_rotary=1)), tmp_path / "source")
    refused_as_broken(source, "source itself fails")


def test_a_source_that_does_not_load_is_called_broken(tmp_path: Path) -> None:
    """An output that no node makes, in a model that would be refused for a state without reader otherwise."""
    model = sized(grouped())
    model.graph.input.append(helper.make_tensor_value_info("past.2.key", TensorProto.FLOAT, [1, 2, "past", SIZE]))
    model.graph.output.append(helper.make_tensor_value_info("present.2.key", TensorProto.FLOAT, None))
    refused_as_broken(save(model, tmp_path / "source"), "does not load in onnxruntime.*present.2.key")


def refused_as_broken(source: Path, words: str) -> None:
    with pytest.raises(NotConvertible, match=words) as caught:
        convert(source, source.parent / "out", OPTIONS)
    assert (caught.value.kind, bool(caught.value.hint)) == ("broken-source", True)
    assert not (source.parent / "out").exists()
    refusal = inspect(source, OPTIONS).refusal
    assert refusal is not None
    assert refusal.reason == caught.value.reason
