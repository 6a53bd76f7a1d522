"""Masks are recognised by what they compute: right ones get their window and slopes, odd ones are refused."""

from __future__ import annotations

from pathlib import Path

import decoder as d
import pytest
from pagegraft.graphpass import ConvertOptions, NotConvertible, convert, inspect

OPTIONS = ConvertOptions(max_positions=128)
SLOPES = (0.5, 0.25, 0.125, 0.0625)


@pytest.mark.parametrize("past", [True, False], ids=["past", "no past"])
@pytest.mark.parametrize(
    ("model", "window", "slopes", "softcap"),
    [
        (d.Decoder(), None, (), 0.0),
        (d.Decoder(visible=d.window(6)), 6, (), 0.0),
        (d.Decoder(visible=d.window(1)), 1, (), 0.0),
        (d.Decoder(visible=d.window(64)), 64, (), 0.0),
        (d.Decoder(scores=d.alibi(SLOPES)), None, SLOPES, 0.0),
        (d.Decoder(scores=d.softcap(2.0)), None, (), 2.0),
        (d.Decoder(visible=d.window(5), scores=d.alibi(SLOPES)), 5, SLOPES, 0.0),
    ],
    ids=["causal", "window 6", "window 1", "window 64", "alibi", "softcap", "window and alibi"],
)
def test_recognised_and_verified(
    model: d.Decoder, window: int | None, slopes: tuple[float, ...], softcap: float, past: bool, tmp_path: Path
) -> None:
    from dataclasses import replace

    source = replace(model, past=past).save(tmp_path / "source")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.verification["verified"]
    assert report.verification["difference"] < 1e-4
    for layer in report.layers:
        assert layer.window == window
        assert layer.alibi_slopes == pytest.approx(slopes, rel=1e-5)
        assert layer.softcap == pytest.approx(softcap, rel=1e-6)
        assert layer.scale == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        (d.dilated, "holes"),
        (d.block_sparse, "no window"),
        (d.tree, "holes"),
        (d.prefix, "future"),
        (d.bidirectional, "future"),
        (d.causal_while_short(40), "holes"),
        (d.causal_while_short(100), "holes"),
    ],
    ids=["dilated", "block sparse", "tree", "prefix", "bidirectional", "short 40", "short 100"],
)
def test_refused(visible: d.Visible, words: str, tmp_path: Path) -> None:
    source = d.Decoder(visible=visible).save(tmp_path / "source")
    with pytest.raises(NotConvertible, match=words) as caught:
        convert(source, tmp_path / "out", OPTIONS)
    assert caught.value.kind == "mask"
    assert caught.value.node
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_residual_of_an_odd_bias_is_stated(tmp_path: Path) -> None:
    def square_root(g: d.Graph, scores: str, r: d.Ranges) -> str:
        distance = g.op("Cast", g.op("Abs", g.op("Sub", r.key, r.query)), to=1)
        return g.op("Sub", scores, g.op("Sqrt", distance))

    report = inspect(d.Decoder(scores=square_root).save(tmp_path / "source"), OPTIONS)
    assert report.refusal is not None
    assert report.refusal.kind == "mask"
    assert "residual" in report.refusal.reason


def test_scores_that_no_attribute_says(tmp_path: Path) -> None:
    report = inspect(d.Decoder(scores=d.clipped).save(tmp_path / "source"), OPTIONS)
    assert report.refusal is not None
    assert report.refusal.kind == "score"


def test_layers_of_different_windows_get_their_own_groups(tmp_path: Path) -> None:
    import json

    import numpy as np

    class Alternating(d.Decoder):
        def _attention(self, g: d.Graph, hidden: str, layer: int, mask: str, ranges: d.Ranges) -> str:
            seen = d.window(4 + 3 * layer)(g, ranges) if layer else d.causal(g, ranges)
            own = g.op("Where", seen, g.constant(0.0, np.float32), g.constant(-1e9, np.float32))
            return super()._attention(g, hidden, layer, own, ranges)

    convert(Alternating(layers=4).save(tmp_path / "source"), tmp_path / "out", OPTIONS)
    manifest = json.loads((tmp_path / "out" / "pagegraft.json").read_text())
    assert [(g["window"], g["layers"], g["block_table"]) for g in manifest["groups"]] == [
        (None, [0], "block_table"),
        (13, [3], "block_table_windowed"),
        (10, [2], "block_table_windowed_2"),
        (7, [1], "block_table_windowed_3"),
    ]
