"""Bad input at the command line: one clear line, a non-zero exit, nothing written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pagegraft import custom_ops, graphpass, runtime
from pagegraft.custom_ops import main
from pagegraft.custom_ops.manifest import file_digest
from pagegraft.graphpass import ConvertOptions, VerificationError, convert, verify

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


@pytest.fixture
def fails_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Like `fails`, in this process, which is quicker: for what is refused before any model runs."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [PAGEGRAFT, *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main.main()
        lines = capsys.readouterr().err.strip().splitlines()
        assert caught.value.code == 1
        assert len(lines) == 1, lines
        assert lines[0].startswith("pagegraft: ")
        return lines[0]

    return run


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


def test_output_folders_and_reports_that_cannot_be(tmp_path: Path, fails_here: Callable[..., str]) -> None:
    source = SOURCES / "llama_gqa__opt"
    (tmp_path / "file").write_text("mine")
    nowhere, out = tmp_path / "nowhere" / "x", tmp_path / "out"
    assert "is a file" in fails_here("convert", source, tmp_path / "file" / "x")
    assert "no folder" in fails_here("convert", source, out, "--report", nowhere)
    assert "is a folder" in fails_here("inspect", source, "--report", tmp_path)
    assert "no folder" in fails_here("inspect", source, "--report", nowhere)
    assert "no folder" in fails_here("conformance", "--case", "core/decode_float32", "--json", nowhere)
    assert "no folder" in fails_here("conformance", "--case", "core/decode_float32", "--junit", nowhere)
    assert "file" in fails_here("conformance", "--case", "core/decode_float32", "--export", tmp_path / "file" / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_options_of_a_conversion(tmp_path: Path, fails_here: Callable[..., str]) -> None:
    source = SOURCES / "llama_gqa__opt"
    assert "power of two" in fails_here("convert", source, tmp_path / "out", "--block-size", "15")
    assert "at least 1" in fails_here("convert", source, tmp_path / "out", "--max-positions", "-5")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["bench", "--baseline", "static", "--source", SOURCES, "--baseline-batch", "a"], "8,16"),
        (["bench", "--baseline-batch", "0"], "at least 1"),
        (["bench", "--baseline", "static"], "--source"),
        (["bench", "--baseline", "static", "--source", "/nowhere"], "does not exist"),
        (["bench", "--rate", "-1"], "positive"),
        (["bench", "--requests", "0"], "at least 1"),
        (["bench", "--seed", "-1"], "at least 0"),
        (["bench", "--block-size", "1024"], "power of two"),
        (["bench", "--json", "/nowhere/x"], "/nowhere"),
        (["bench", "--trace", "/nowhere"], "/nowhere"),
        (["chat", "--chat-template", "/nowhere"], "/nowhere"),
    ],
)
def test_options_that_cannot_work(
    converted: Path, arguments: list[str | Path], word: str, fails_here: Callable[..., str]
) -> None:
    assert word in fails_here(arguments[0], converted, *arguments[1:])


def test_files_of_calibrate(converted: Path, tmp_path: Path, fails_here: Callable[..., str]) -> None:
    (tmp_path / "text.txt").write_text("a text " * 50)
    assert "no folder" in fails_here("calibrate", converted, tmp_path / "text.txt", "--out", tmp_path / "nowhere" / "x")
    assert "cannot be read" in fails_here("calibrate", converted, tmp_path / "nowhere.txt")
    assert "cannot be read" in fails_here(
        "accuracy", converted, "--against", converted, "--text", tmp_path / "nowhere.txt"
    )


def test_a_folder_that_is_not_there_is_the_same_everywhere(
    converted: Path, tmp_path: Path, fails_here: Callable[..., str]
) -> None:
    nope = tmp_path / "nope"
    (tmp_path / "text.txt").write_text("a text " * 50)
    said = {
        fails_here("accuracy", converted, "--against", nope),
        fails_here("accuracy", nope, "--against", converted),
        fails_here("calibrate", nope, tmp_path / "text.txt"),
        fails_here("generate", nope, "-p", "a"),
        fails_here("bench", nope),
    }
    assert said == {f"pagegraft: {nope} is no folder; give the folder that `pagegraft convert` wrote"}


def test_accuracy_against_quantised_caches_is_refused(
    converted: Path, tmp_path: Path, fails_here: Callable[..., str]
) -> None:
    quantised = tmp_path / "int8"
    shutil.copytree(converted, quantised)
    raw = json.loads((quantised / "pagegraft.json").read_text())
    raw["layers"] = [
        {**layer, "key_dtype": "int8", "value_dtype": "int8", "quant": "PER_TOKEN"} for layer in raw["layers"]
    ]
    (quantised / "pagegraft.json").write_text(json.dumps(raw))
    assert f"{quantised} has int8 caches" in fails_here("accuracy", converted, "--against", quantised)


def test_an_error_of_the_operating_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "model.onnx")

    monkeypatch.setattr(main, "_application", lambda: full)
    with pytest.raises(SystemExit, match="1"):
        main.main()
    assert capsys.readouterr().err == "pagegraft: model.onnx: No space left on device\n"


#: A command that is interrupted while it imports a module, and goes on importing for a while.
INTERRUPTED = """
import importlib.abc, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.argv[1:] = ["--help"]
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except BaseException as error:
                raise ImportError("initialization failed") from error  # what extension modules make of it
sys.meta_path.insert(0, Finder())
from pagegraft.custom_ops.main import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "onnxruntime", "pagegraft.graphpass.pipeline", "pagegraft.runtime.cli"])
def test_an_interrupt_during_the_imports_ends_without_a_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = version("pagegraft")
    monkeypatch.setattr(sys, "argv", [PAGEGRAFT, "--version"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert (caught.value.code, capsys.readouterr().out) == (0, f"pagegraft {expected}\n")
    assert {package.__version__ for package in (custom_ops, graphpass, runtime)} == {expected}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = custom_ops.nothing


def without_numbers(converted: Path, folder: Path) -> Path:
    """The model with a weight that is NaN, so that it fails on every token."""
    shutil.copytree(converted, folder)
    model = onnx.load(folder / "model.onnx")
    weight = max(model.graph.initializer, key=lambda t: (t.data_type == TensorProto.FLOAT, np.prod(t.dims)))
    weight.CopyFrom(numpy_helper.from_array(np.full(tuple(weight.dims), np.nan, np.float32), weight.name))
    onnx.save(model, folder / "model.onnx")
    raw = json.loads((folder / "pagegraft.json").read_text())
    raw["graph_digest"] = file_digest(folder / "model.onnx")
    (folder / "pagegraft.json").write_text(json.dumps(raw))
    return folder


def test_a_model_that_fails_is_no_success(converted: Path, tmp_path: Path) -> None:
    model = without_numbers(converted, tmp_path / "nan")
    for arguments in (["-p", "a"], ["-p", "a", "-p", "b"], ["-p", "a", "--json"]):
        assert "requests failed" in fails("generate", model, "--kv-memory", "1MB", *arguments)
    short = ["--requests", "2", "--prompt-len", "4", "--output-len", "2", "--kv-memory", "1MB"]
    assert "requests failed" in fails("bench", model, *short)


def test_a_failed_request_in_json_says_why(converted: Path, tmp_path: Path) -> None:
    model = without_numbers(converted, tmp_path / "nan")
    command = [PAGEGRAFT, "generate", str(model), "-p", "a", "--json", "--kv-memory", "1MB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert answer["finish_reason"] == "error"
    assert answer["error"]


def test_a_failed_check_of_an_old_conversion_does_not_speak_of_writing(converted: Path, tmp_path: Path) -> None:
    model = without_numbers(converted, tmp_path / "nan")
    with pytest.raises(VerificationError) as caught:
        verify(SOURCES / "llama_gqa__opt", model)
    assert "nothing was written" not in str(caught.value)


def test_ports_have_a_range(converted: Path) -> None:
    command = [PAGEGRAFT, "serve", str(converted), "--port", "99999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "http://" not in done.stdout
    assert "65535" in done.stderr


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
