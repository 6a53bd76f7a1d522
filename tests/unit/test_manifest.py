"""The manifest of a converted model: names, what survives the file, and each refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagegraft.custom_ops.errors import ManifestError
from pagegraft.custom_ops.manifest import (
    MANIFEST_FILE,
    CacheGroup,
    CacheLayer,
    Manifest,
    block_table_name,
    cache_name,
    file_digest,
    slot_mapping_name,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as the graph pass leaves it: model, one data file, manifest."""
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "model.onnx.data").write_bytes(b"weights")
    _manifest(tmp_path).save(tmp_path)
    return tmp_path


def _manifest(folder: Path) -> Manifest:
    layer = CacheLayer(
        group=0, kv_heads=2, key_head_size=16, value_head_size=16, key_dtype="float32", value_dtype="float32"
    )
    data = folder / "model.onnx.data"
    return Manifest(
        model_file="model.onnx",
        graph_digest=file_digest(folder / "model.onnx"),
        groups=(
            CacheGroup(window=None, layers=(0,), block_table="block_table", slot_mapping="slot_mapping"),
            CacheGroup(window=8, layers=(1,), block_table=block_table_name(1), slot_mapping=slot_mapping_name(1)),
        ),
        layers=(layer, replace(layer, group=1, value_head_size=None, value_dtype=None)),
        positions="past",
        vocab_size=256,
        compute_dtype="float32",
        max_positions=512,
        data_files={data.name: {"size": data.stat().st_size, "digest": file_digest(data)}},
        verification={"max_error": 1e-6},
    )


def test_names_are_genais() -> None:
    assert block_table_name(0) == "block_table"
    assert block_table_name(1) == "block_table_windowed"
    assert block_table_name(2) == "block_table_windowed_2"
    assert slot_mapping_name(0) == "slot_mapping"
    assert slot_mapping_name(3) == "slot_mapping_windowed_3"
    assert cache_name(3, "key") == "past_key_values.3.key"
    assert cache_name(0, "value_scale", present=True) == "present.0.value_scale"


def test_a_manifest_survives_its_file(folder: Path) -> None:
    assert Manifest.load(folder, check_data_digests=True) == _manifest(folder)


def test_an_altered_graph_is_refused(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"grapH")
    with pytest.raises(ManifestError, match=r"model\.onnx.*altered"):
        Manifest.load(folder)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ManifestError, match=f"{name} is missing"):
        Manifest.load(folder)


def test_data_files_are_checked_by_size_and_on_request_by_digest(folder: Path) -> None:
    (folder / "model.onnx.data").write_bytes(b"weighty")
    Manifest.load(folder)
    with pytest.raises(ManifestError, match="altered"):
        Manifest.load(folder, check_data_digests=True)
    (folder / "model.onnx.data").write_bytes(b"weight")
    with pytest.raises(ManifestError, match="6 bytes"):
        Manifest.load(folder)


def test_a_folder_without_manifest_tells_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="pagegraft convert"):
        Manifest.load(tmp_path)


def test_broken_json_is_refused(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(ManifestError, match="not valid JSON"):
        Manifest.load(folder)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_format_version_is_refused(folder: Path, version: Any) -> None:
    _edit(folder, "format_version", version)
    with pytest.raises(ManifestError, match="format version"):
        Manifest.load(folder)


@pytest.mark.parametrize(("key", "value"), [("groups", [{"window": 1}]), ("layers", None), ("surplus", 1)])
def test_a_damaged_manifest_is_refused(folder: Path, key: str, value: Any) -> None:
    _edit(folder, key, value)
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.load(folder)


@pytest.mark.parametrize("size", [0, -16, 15, 1024, None, "16", 16.0])
def test_a_block_size_that_cannot_be_is_refused(folder: Path, size: Any) -> None:
    _edit(folder, "default_block_size", size)
    with pytest.raises(ManifestError, match="power of two up to 512"):
        Manifest.load(folder)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_json_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError):
        Manifest.load(folder)


def _edit(folder: Path, key: str, value: Any) -> None:
    raw = json.loads((folder / MANIFEST_FILE).read_text())
    raw[key] = value
    (folder / MANIFEST_FILE).write_text(json.dumps(raw), encoding="utf-8")
