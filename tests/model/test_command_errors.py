"""Bad input at the command line: one clear line, a non-zero exit, nothing written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pagegraft.graphpass import ConvertOptions, convert

SOURCES = Path(__file__).parents[1] / "data" / "zoo"
PAGEGRAFT = str(Path(sys.executable).parent / "pagegraft")


def fails(*arguments: str | Path) -> str:
    """Runs `pagegraft`, which must fail with one line; returns it."""
    done = subprocess.run([PAGEGRAFT, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("pagegraft: ")
    return lines[0]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "llama"
    convert(SOURCES / "llama_gqa__opt", out, ConvertOptions())
    return out


def model_without_attention(path: Path) -> None:
    table = numpy_helper.from_array(np.ones((50, 8), np.float32), "table")
    weight = numpy_helper.from_array(np.ones((8, 8), np.float32), "weight")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "weight"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 8])
    graph = helper.make_graph(nodes, "encoder", [ids], [logits], [table, weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


@pytest.mark.parametrize("name", ["broken.onnx", "folder"])
def test_not_onnx(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    file = source if source.suffix else source / "model.onnx"
    file.parent.mkdir(exist_ok=True)
    file.write_text("this is no model")
    assert "ONNX" in fails("convert", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_attention(tmp_path: Path) -> None:
    model_without_attention(tmp_path / "encoder.onnx")
    assert "no attention" in fails("convert", tmp_path / "encoder.onnx", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["encoder.onnx"]


def test_missing_external_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCES / "llama_gqa__genai", source)
    (source / "model.onnx.data").unlink()
    assert "model.onnx.data" in fails("convert", source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_output_folder_with_other_content(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "other content" in fails("convert", SOURCES / "llama_gqa__opt", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_source_does_not_exist(tmp_path: Path) -> None:
    assert "does not exist" in fails("convert", tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-p", ""], "empty"),
        (["-p", "a " * 400], "context of 256"),
        (["-p", "a " * 200, "--kv-memory", "64KB"], "--kv-memory"),
        (["-p", "a", "--kv-memory", "1KB"], "at least"),
        (["-p", "a", "--kv-memory", "plenty"], "plenty"),
    ],
)
def test_requests_that_cannot_run(converted: Path, arguments: list[str], word: str) -> None:
    assert word in fails("generate", converted, *arguments)


def test_altered_graph(converted: Path, tmp_path: Path) -> None:
    altered = tmp_path / "altered"
    shutil.copytree(converted, altered)
    with (altered / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert "altered" in fails("generate", altered, "-p", "a")


def test_not_a_converted_model(tmp_path: Path) -> None:
    assert "pagegraft convert" in fails("generate", tmp_path, "-p", "a")
