"""Exported vectors: what is written, that a foreign replay agrees, that damage is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from pagegraft.custom_ops import library_path
from pagegraft.custom_ops.conformance import all_cases, load_backend
from pagegraft.custom_ops.conformance.vectors import export_cases, read_vector, run_folder
from pagegraft.custom_ops.errors import ContractError

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay_vectors"
_WANTED = ("core/decode_", "masks/everything", "layout/dead_nan_", "layout/no_seq", "latent/", "quantised/int")
CHOSEN = [c for c in all_cases() if c.id.startswith(_WANTED) and "context" not in c.id and "long" not in c.id][::4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vectors") / "out"
    count, size = export_cases(place, CHOSEN)
    assert count == len(CHOSEN) > 30
    assert size == sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    return place


def test_layout_is_onnx_own(folder: Path) -> None:
    for case in CHOSEN:
        place = folder / case.id
        model = onnx.load(place / "model.onnx")
        for kind, values in (("input", model.graph.input), ("output", model.graph.output)):
            for i, value in enumerate(values):
                tensor = onnx.TensorProto.FromString((place / f"test_data_set_0/{kind}_{i}.pb").read_bytes())
                assert tensor.name == value.name
                assert tensor.data_type == value.type.tensor_type.elem_type
                npy = np.load(place / f"test_data_set_0/{kind}_{i}.npy")
                assert npy.tobytes() == tensor.raw_data
                assert list(npy.shape) == list(tensor.dims)
        assert "key_cache_out" in [o.name for o in model.graph.output]
    text = (folder / "README.md").read_text()
    assert "cumulative_sequence_length" in text
    assert "case.json" in text


def test_import_runs_them(folder: Path) -> None:
    for name in ("cpu", "reference"):
        results = run_folder(load_backend(name), folder)
        assert [r.id for r in results if r.status != "passed"] == []
        assert len(results) == len(CHOSEN)


@pytest.mark.parametrize("script", ["replay_npy.py", "replay_pb.py"])
def test_replay_without_this_package(folder: Path, script: str) -> None:
    command = [sys.executable, str(EXAMPLE / script), str(folder), str(library_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHOSEN)} of {len(CHOSEN)} vectors agree" in done.stdout


@pytest.mark.parametrize("script", ["replay_npy.py", "replay_pb.py"])
def test_replay_says_what_it_lacks(folder: Path, script: str) -> None:
    for arguments, reason in (
        (["nope", str(library_path())], "nope holds no vectors"),
        ([str(folder), "nolib.so"], "nolib.so is no custom-op library"),
        ([str(folder)], "VECTORS LIBRARY"),
    ):
        command = [sys.executable, str(EXAMPLE / script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stdout == ""
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_replay_uses_onnxruntime_and_numpy_only() -> None:
    lines = [line for line in (EXAMPLE / "replay_npy.py").read_text().splitlines() if line.strip()]
    imports = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))}
    assert imports == {"json", "sys", "pathlib", "numpy", "onnxruntime"}
    assert len(lines) <= 52


def test_replay_sees_a_wrong_expectation(folder: Path, tmp_path: Path) -> None:
    source = folder / "core" / "decode_float32"
    place = tmp_path / "core" / "decode_float32"
    (place / "test_data_set_0").mkdir(parents=True)
    for path in source.rglob("*.*"):
        (place / path.relative_to(source)).write_bytes(path.read_bytes())
    output = place / "test_data_set_0" / "output_0.npy"
    array = np.load(output)
    array[0, 0] += 1e-3
    np.save(output, array)
    command = [sys.executable, str(EXAMPLE / "replay_npy.py"), str(tmp_path), str(library_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "decode_float32: output" in done.stdout
    pb = place / "test_data_set_0" / "output_0.pb"
    tensor = onnx.TensorProto.FromString(pb.read_bytes())
    tensor.raw_data = array.tobytes()
    pb.write_bytes(tensor.SerializeToString())
    assert [r.status for r in run_folder(load_backend("reference"), tmp_path)] == ["failed"]


def test_reading_gives_back_the_call(folder: Path) -> None:
    for case in CHOSEN:
        call, _ = read_vector(folder / case.id)
        original = case.call()
        assert call.parsed() == original.parsed()
        assert {n: a.tobytes() for n, a in call.feeds.items()} == {n: a.tobytes() for n, a in original.feeds.items()}


def test_case_json_has_a_rule_for_every_output(folder: Path) -> None:
    for case in CHOSEN:
        document = json.loads((folder / case.id / "case.json").read_text())
        for entry in document["outputs"]:
            assert set(entry["compare"]) & {"exact", "steps", "absolute"}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ContractError, match="not an empty folder"):
        export_cases(tmp_path, CHOSEN[:1])
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_written_is_named_as_given() -> None:
    with pytest.raises(ContractError, match=r"^/proc/vectors cannot be written \(.*\); name a new folder"):
        export_cases(Path("/proc/vectors"), CHOSEN[:1])


def test_a_folder_without_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"model\.onnx"):
        run_folder(load_backend("reference"), tmp_path)


def test_damage_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ContractError, match="no ONNX model"):
        read_vector(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.onnx").write_bytes((folder / "core/decode_float32/model.onnx").read_bytes())
    with pytest.raises(ContractError, match=r"input_0\.pb is missing"):
        read_vector(tmp_path / "b")
