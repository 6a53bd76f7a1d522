"""What `convert` prints of layers: one line for all that are alike."""

from __future__ import annotations

from typing import Any

from pagegraft.graphpass.report import LayerReport
from pagegraft.graphpass.tables import layer_lines


def layer(index: int, **facts: Any) -> LayerReport:
    default: dict[str, Any] = {
        "form": "softmax",
        "heads": 9,
        "kv_heads": 3,
        "key_head_size": 64,
        "value_head_size": 64,
        "mask": "causal",
        "window": None,
        "scale": 0.125,
        "softcap": 0.0,
        "sinks": False,
        "alibi_slopes": (),
        "fused": ("rotary",),
        "caches": (f"past.{index}",),
        "nodes_dropped": 3,
    }
    return LayerReport(layer=index, node=f"/layers.{index}/Softmax", **{**default, **facts})


def test_equal_layers_are_one_line_without_a_name() -> None:
    assert layer_lines([layer(i) for i in range(30)]) == ["30 layers: softmax, 9 heads on 3 of size 64, causal, rotary"]
    assert layer_lines([layer(0)]) == ["1 layer: softmax, 9 heads on 3 of size 64, causal, rotary"]


def test_layers_that_differ_are_named() -> None:
    windowed = {"mask": "window 512", "window": 512, "softcap": 50.0, "sinks": True}
    layers = [layer(i) if i in (5, 11) else layer(i, **windowed) for i in range(14)]
    kind = "softmax, 9 heads on 3 of size 64"
    assert layer_lines(layers) == [
        f"layers 0-4, 6-10, 12-13: {kind}, window 512, rotary, softcap 50, sinks; first '/layers.0/Softmax'",
        f"layers 5, 11: {kind}, causal, rotary; first '/layers.5/Softmax'",
    ]
    latent = layer(1, key_head_size=40, value_head_size=32, latent=True)
    assert layer_lines([layer(0), latent]) == [
        f"layer 0: {kind}, causal, rotary; '/layers.0/Softmax'",
        "layer 1: softmax, 9 heads on 3 of size 40/32, causal, rotary, latent cache; '/layers.1/Softmax'",
    ]
