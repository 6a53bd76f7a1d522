"""Models for stock onnxruntime CUDA and for Ascend: limits refused, structure as the kernels' contract wants it.

There is no such device here: schema, types, shapes and attributes are checked against the installed onnxruntime's own
schema, and the numbers on this CPU through pagegraft's kernel of the same op.
"""

from __future__ import annotations

import json
from pathlib import Path

import decoder as d
import onnx
import pytest
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import ConvertOptions, NotConvertible, convert
from test_element_types import in_type


def half(folder: Path, model: d.Decoder) -> Path:
    folder.mkdir()
    onnx.save(in_type(model.model(), TensorProto.FLOAT16), folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "eos_token_id": 2}))
    return folder


MODELS = {
    "learned positions": d.Decoder(),
    "window": d.Decoder(visible=d.window(6)),
    "softcap": d.Decoder(scores=d.softcap(2.0)),
}


@pytest.mark.parametrize("name", MODELS)
def test_stock_cuda_model(name: str, tmp_path: Path) -> None:
    source = half(tmp_path / "source", MODELS[name])
    report = convert(source, tmp_path / "out", ConvertOptions(target="ort-cuda", max_positions=96))
    assert report.verification["verified"]
    model = onnx.load(tmp_path / "out" / "model.onnx")
    inputs = [i.name for i in model.graph.input]
    assert inputs[:4] == ["input_ids", "cumulative_sequence_lengths", "past_sequence_lengths", "block_table"]
    assert "attention_metadata" in inputs
    assert not {"slot_mapping", "position_ids"} & set(inputs)
    (schema,) = [s for s in get_all_operator_schema() if s.name == "PagedAttention" and s.domain == "com.microsoft"]
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    nodes = [n for n in model.graph.node if n.op_type == "PagedAttention"]
    assert len(nodes) == 2
    for node in nodes:
        assert node.domain == "com.microsoft"
        assert len(node.input) <= len(schema.inputs)
        assert {a.name for a in node.attribute} <= set(schema.attributes)
    assert "tensor(float16)" in constraints["T"] & constraints["T_CACHE"]
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert set(config["model"]["decoder"]["inputs"].values()) >= set(inputs) - {
        i for i in inputs if i.startswith("past_key_values")
    }
    assert config["model"]["eos_token_id"] == 2
    assert config["model"]["decoder"]["state_groups"][0]["layer_ids"] == [0, 1]


@pytest.mark.parametrize(
    ("target", "model", "in_half", "words"),
    [
        ("ort-cuda", d.Decoder(), False, "float32"),
        ("ort-cuda", d.Decoder(scores=d.alibi((0.5, 0.25, 0.125, 0.0625))), True, "ALiBi"),
    ],
)
def test_limits_of_targets(target: str, model: d.Decoder, in_half: bool, words: str, tmp_path: Path) -> None:
    source = half(tmp_path / "source", model) if in_half else model.save(tmp_path / "source")
    options = ConvertOptions(target=target, max_positions=96)  # type: ignore[arg-type]
    with pytest.raises(NotConvertible, match=words) as caught:
        convert(source, tmp_path / "out", options)
    assert caught.value.kind == "target"
    assert not (tmp_path / "out").exists()


def test_ascend_takes_what_its_kernel_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ConvertOptions(target="ascend", max_positions=96)
    monkeypatch.setattr(d, "SIZE", 16)
    monkeypatch.setattr(d, "WIDTH", 16 * d.HEADS)
    report = convert(d.Decoder().save(tmp_path / "source"), tmp_path / "out", options)
    assert report.verification["verified"]
    manifest = Manifest.load(tmp_path / "out")
    assert (manifest.target, manifest.compute_dtype) == ("ascend", "float32")
    assert not {"Pad", "Slice"} & {n.op_type for n in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    monkeypatch.setattr(d, "SIZE", 264)
    monkeypatch.setattr(d, "WIDTH", 264 * d.HEADS)
    with pytest.raises(NotConvertible, match="up to 256, not 264"):
        convert(d.Decoder().save(tmp_path / "large"), tmp_path / "refused", options)
