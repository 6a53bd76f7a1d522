"""The graph pass inside other tools' pipelines: a workflow of Microsoft Olive, and a sequence of onnx_ir passes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import decoder as d
import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common
from pagegraft.custom_ops import manifest as names
from pagegraft.graphpass import ConvertOptions, NotConvertible, PagedAttentionPass, convert
from pagegraft.graphpass.packed import PackedModel

MAX_POSITIONS = 64
WORK = [(0, [3, 1, 4, 1, 5]), (1, [9, 2])]


def _source(folder: Path, model: d.Decoder) -> Path:
    model.save(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": MAX_POSITIONS}))
    return folder / "model.onnx"


def _logits(model: Path, manifest: names.Manifest) -> list[np.ndarray]:
    return PackedModel(model, manifest).step(WORK)


# --- onnx_ir ---------------------------------------------------------------------------------------------------------


def test_in_a_sequence_of_passes(tmp_path: Path) -> None:
    """Between other passes, with options: the result computes what `convert` with the same options makes."""
    file = _source(tmp_path / "source", d.Decoder(rotate=d.rotary, learned_positions=False))
    options = ConvertOptions(fuse=False, max_positions=MAX_POSITIONS)
    paged = PagedAttentionPass(options)
    pipeline = ir.passes.Sequential(
        common.ClearMetadataAndDocStringPass(), paged, common.RemoveUnusedNodesPass(), common.CheckerPass()
    )
    model = ir.load(file)
    result = pipeline(model)
    assert result.modified
    assert result.model is model
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("PagedAttention") == 2
    assert "Cos" in kinds  # not fused, as the options say
    assert paged.analysis is not None
    assert len(paged.layers) == 2
    ir.save(model, tmp_path / "sequence.onnx")
    convert(file, tmp_path / "out", options)
    manifest = names.Manifest.load(tmp_path / "out")
    for mine, wanted in zip(
        _logits(tmp_path / "sequence.onnx", manifest), _logits(tmp_path / "out" / "model.onnx", manifest), strict=True
    ):
        np.testing.assert_array_equal(mine, wanted)


def test_in_a_pass_manager(tmp_path: Path) -> None:
    """A PassManager of one step gives the fused form by default."""
    model = ir.load(_source(tmp_path, d.Decoder(rotate=d.rotary, learned_positions=False)))
    paged = PagedAttentionPass(ConvertOptions(max_positions=MAX_POSITIONS))
    assert ir.passes.PassManager([paged], steps=1)(model).modified
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("PagedAttention") == 2
    assert "Cos" not in kinds


def test_a_refusal_ends_a_sequence_and_leaves_the_model(tmp_path: Path) -> None:
    model = ir.load(_source(tmp_path, d.Decoder(visible=d.dilated)))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(ir.passes.PassError) as failure:
        ir.passes.Sequential(PagedAttentionPass(ConvertOptions(max_positions=MAX_POSITIONS)))(model)
    assert isinstance(failure.value.__cause__, NotConvertible)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# --- Olive -----------------------------------------------------------------------------------------------------------


def _workflow(model: Path, out: Path, cache: Path, **parameters: object) -> dict[str, object]:
    return {
        "input_model": {"type": "ONNXModel", "model_path": str(model)},
        "passes": {"paged": {"type": "PagegraftPagedAttention", **parameters}},
        "output_dir": str(out),
        "cache_dir": str(cache),
        "log_severity_level": 3,
    }


def _converted_folder(out: Path) -> Path:
    (file,) = out.rglob(names.MANIFEST_FILE)
    return file.parent


def test_without_olive_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "olive", None)
    for name in [n for n in sys.modules if n.startswith("olive.") or n == "pagegraft.graphpass.olive"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="pip install olive-ai"):
        __import__("pagegraft.graphpass.olive")


@pytest.mark.slow
def test_parameters_are_the_options() -> None:
    pytest.importorskip("olive.passes")
    from olive.hardware import DEFAULT_CPU_ACCELERATOR
    from pagegraft.graphpass.olive import PagegraftPagedAttention

    parameters = PagegraftPagedAttention.default_config(DEFAULT_CPU_ACCELERATOR)
    assert {n: p.default_value for n, p in parameters.items()} == {f.name: f.default for f in fields(ConvertOptions)}


@pytest.mark.slow
def test_workflow_names_the_pass(tmp_path: Path) -> None:
    """A whole Olive run: what it puts out is a converted model, equal to the one that `convert` makes."""
    olive = pytest.importorskip("olive.workflows")
    from pagegraft.graphpass.olive import package_config

    file = _source(tmp_path / "source", d.Decoder(rotate=d.rotary, learned_positions=False))
    workflow = _workflow(file, tmp_path / "out", tmp_path / "cache", fuse=False, block_size=32)
    olive.run(workflow, package_config=package_config(), tempdir=str(tmp_path))
    folder = _converted_folder(tmp_path / "out")
    manifest = names.Manifest.load(folder)
    assert manifest.default_block_size == 32
    assert manifest.verification["verified"]
    assert manifest.max_positions == MAX_POSITIONS
    convert(file, tmp_path / "wanted", ConvertOptions(fuse=False, block_size=32))
    for mine, wanted in zip(
        _logits(folder / manifest.model_file, manifest),
        _logits(tmp_path / "wanted" / "model.onnx", manifest),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.slow
def test_workflow_of_a_model_that_cannot_be_converted(tmp_path: Path) -> None:
    olive = pytest.importorskip("olive.workflows")
    from pagegraft.graphpass.olive import package_config

    file = _source(tmp_path / "source", d.Decoder(visible=d.dilated))
    with pytest.raises(NotConvertible, match="holes"):
        olive.run(
            _workflow(file, tmp_path / "out", tmp_path / "cache"),
            package_config=package_config(),
            tempdir=str(tmp_path),
        )
    assert not list(tmp_path.glob("out/**/*.onnx"))


@pytest.mark.slow
def test_command_line_of_olive(tmp_path: Path) -> None:
    """The two commands of the module's docstring."""
    pytest.importorskip("olive.workflows")
    command = shutil.which("olive", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the command of Olive is not installed")
    file = _source(tmp_path / "source", d.Decoder())
    packages = subprocess.run(
        [sys.executable, "-m", "pagegraft.graphpass.olive"], capture_output=True, text=True, check=True
    )
    (tmp_path / "packages.json").write_text(packages.stdout)
    (tmp_path / "workflow.json").write_text(json.dumps(_workflow(file, tmp_path / "out", tmp_path / "cache")))
    subprocess.run(
        [command, "run", "--config", "workflow.json", "--package-config", "packages.json"], cwd=tmp_path, check=True
    )
    assert names.Manifest.load(_converted_folder(tmp_path / "out")).verification["verified"]
