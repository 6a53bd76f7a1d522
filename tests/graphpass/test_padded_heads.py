"""Head sizes that the Ascend kernel does not take are padded; the padded model computes what its source computes.

On this CPU through pagegraft's kernel, and each of its attentions through the emulated Ascend kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import decoder as d
import numpy as np
import onnx
import pytest
from pagegraft.custom_ops.ascend.backend import MAX_ALIBI_HEADS
from pagegraft.custom_ops.ascend.build import ROOT
from pagegraft.custom_ops.ascend.emulation import Device, paged_attention
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.custom_ops.spec import INPUTS, AttentionAttributes
from pagegraft.graphpass import ConvertOptions, VerificationError, convert, pipeline
from pagegraft.graphpass.packed import PackedModel
from test_targets import half

ZOO = Path(__file__).parents[1] / "data" / "zoo"
OPTIONS = ConvertOptions(target="ascend", max_positions=96)
MODELS = {
    "learned positions": d.Decoder(),
    "rotary": d.Decoder(rotate=d.rotary, learned_positions=False),
    "window": d.Decoder(visible=d.window(6)),
    "softcap": d.Decoder(scores=d.softcap(2.0)),
    "alibi": d.Decoder(scores=d.alibi((0.5, 0.25, 0.125, 0.0625)), learned_positions=False),
}


@pytest.fixture(params=[8, 10, 40])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The head size of the decoders."""
    monkeypatch.setattr(d, "SIZE", request.param)
    monkeypatch.setattr(d, "WIDTH", request.param * d.HEADS)
    return request.param


def attention_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == "PagedAttention"]


@pytest.mark.parametrize("name", MODELS)
def test_padded_model_equals_its_source(name: str, size: int, tmp_path: Path) -> None:
    source = MODELS[name].save(tmp_path / "source")
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.verification["difference"] < 1e-4  # against the source in plain onnxruntime
    wide = -(-size // 16) * 16
    manifest = Manifest.load(tmp_path / "out")
    assert {(layer.key_head_size, layer.value_head_size) for layer in manifest.layers} == {(wide, wide)}
    assert any(f"{size} to {wide}" in note for note in report.notes)
    model = onnx.load(tmp_path / "out" / "model.onnx")
    for node in attention_nodes(model):
        (scale,) = [a.f for a in node.attribute if a.name == "scale"]
        assert scale == np.float32(0.3)  # the decoder's own, whatever the padded size
    _check_in_emulator(tmp_path / "out", manifest, model)


def test_half_precision(tmp_path: Path) -> None:
    report = convert(half(tmp_path / "source", d.Decoder()), tmp_path / "out", OPTIONS)
    assert report.verification["verified"]
    manifest = Manifest.load(tmp_path / "out")
    _check_in_emulator(tmp_path / "out", manifest, onnx.load(tmp_path / "out" / "model.onnx"))


def _check_in_emulator(folder: Path, manifest: Manifest, model: onnx.ModelProto) -> None:
    """Runs two steps of the model; every attention of the second again in the emulated kernel, on the same operands."""
    nodes = attention_nodes(model)
    names = sorted({name for node in nodes for name in (*node.input[:3], node.output[0])})
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    onnx.save(model, folder / "exposed.onnx")
    packed = PackedModel(folder / "exposed.onnx", manifest, num_blocks=32, block_size=4, exposed=names)
    packed.step([(0, [3, 1, 4, 1, 5, 9, 2]), (1, [6, 5])])
    work = [(1, [3, 5, 8, 9, 7]), (0, [2]), (2, [4, 4, 4])]
    before = {name: array.copy() for name, array in packed._caches.items()}
    feeds = packed._feeds(work)
    packed.step(work)
    given = {**before, **feeds, **packed.last_exposed}
    for node in nodes:
        operands = {spec.name: given[name] for spec, name in zip(INPUTS, node.input, strict=False) if name}
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        outputs, _ = paged_attention(operands, AttentionAttributes.from_dict(attributes), Device())
        expected = given[node.output[0]].astype(np.float64)
        tolerance = 1e-5 if operands["query"].dtype == np.float32 else 4e-3
        np.testing.assert_allclose(outputs["output"].astype(np.float64), expected, atol=tolerance * expected.std())


@pytest.mark.parametrize("name", ["gpt2__opt", "phi3__opt", "mpt__mob"])
def test_exports_with_padded_heads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel wanted multiples of 24: packed projections, grouped heads, ALiBi."""
    from pagegraft.graphpass.rewrite import model as rewriting

    monkeypatch.setattr(rewriting, "head_multiple", lambda _: 24)
    report = convert(ZOO / name, tmp_path / "out", ConvertOptions(target="ascend"))
    assert report.verification["difference"] < 1e-4
    assert all(layer.key_head_size % 24 == 0 for layer in Manifest.load(tmp_path / "out").layers)


def test_layer_slices_of_a_padded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "too_large_to_run", lambda _: True)
    report = convert(d.Decoder().save(tmp_path / "source"), tmp_path / "out", OPTIONS)
    assert "layer slices" in report.verification["scope"]
    assert report.verification["difference"] < 1e-4


def test_a_wrong_layer_of_a_padded_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegraft.graphpass.rewrite import insert_op

    monkeypatch.setattr(insert_op, "attributes_of", partial(_narrow, insert_op.attributes_of))
    with pytest.raises(VerificationError, match="layer 0"):
        convert(d.Decoder().save(tmp_path / "source"), tmp_path / "out", OPTIONS)


def _narrow(right: object, site: object) -> AttentionAttributes:
    """The attributes with a window that the source does not have."""
    from dataclasses import replace

    return replace(right(site), local_window_size=3)  # type: ignore[operator]


def test_the_limit_of_slopes_is_the_tiling_s() -> None:
    header = (ROOT / "op_kernel" / "paged_attention_tiling_data.h").read_text()
    assert f"kMaxAlibiHeads = {MAX_ALIBI_HEADS};" in header
