"""Models whose data file is a link: `--link` twice, and the layout of a model hub's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from pagegraft.graphpass import ConvertOptions, SourceError, convert, inspect

SOURCE = Path(__file__).parents[1] / "data" / "zoo" / "llama_gqa__genai"


def test_a_linked_source_converts_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    for name in ("first", "second"):
        convert(source, tmp_path / name, ConvertOptions(link=True))
    assert (source / "model.onnx.data").stat().st_nlink == 3
    assert inspect(source).convertible
    convert(source, tmp_path / "int8", ConvertOptions(link=True, kv_dtype="int8"))


def test_a_hub_s_symbolic_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, file in enumerate(sorted(SOURCE.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / str(number))
    convert(snapshot, tmp_path / "out", ConvertOptions())
    assert not (tmp_path / "out" / "model.onnx.data").is_symlink()


def test_data_outside_the_folder_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    (source / "model.onnx.data").rename(tmp_path / "elsewhere.bin")
    file = source / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../elsewhere.bin"
    onnx.save(model, file)
    with pytest.raises(SourceError, match="outside its folder"):
        convert(source, tmp_path / "out", ConvertOptions())
    assert not (tmp_path / "out").exists()
