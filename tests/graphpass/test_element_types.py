"""Half-precision models: float16 stays, bfloat16 is computed in float32 by oracle and conversion alike."""

from __future__ import annotations

import json
from pathlib import Path

import decoder as d
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from pagegraft.graphpass import ConvertOptions, convert

OPTIONS = ConvertOptions(max_positions=128)
TYPES = {
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}


def in_type(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """The same decoder with every float32 tensor of another type."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = np.clip(numpy_helper.to_array(tensor), -6e4, 6e4).astype(TYPES[kind])
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = kind
    return model


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize(
    ("kind", "compute"), [(TensorProto.FLOAT16, "float16"), (TensorProto.BFLOAT16, "float32")], ids=["fp16", "bf16"]
)
def test_converts(kind: int, compute: str, external: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model = in_type(d.Decoder(visible=d.window(6)).model(), kind)
    onnx.save(model, source / "model.onnx", save_as_external_data=external, location="weights.bin", size_threshold=256)
    report = convert(source, tmp_path / "out", OPTIONS)
    assert report.compute_dtype == compute
    assert any("bfloat16" in note for note in report.notes) == (kind == TensorProto.BFLOAT16)
    assert report.verification["verified"]
    assert [layer.window for layer in report.layers] == [6, 6]
    manifest = json.loads((tmp_path / "out" / "pagegraft.json").read_text())
    assert {layer["key_dtype"] for layer in manifest["layers"]} == {compute}
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    ops = [n for n in onnx.load(tmp_path / "out" / "model.onnx").graph.node if n.op_type == "PagedAttention"]
    assert {n.domain for n in ops} == {"com.microsoft" if compute == "float16" else "pagegraft"}
