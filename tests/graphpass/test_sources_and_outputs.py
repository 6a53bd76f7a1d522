"""What is no model, what may not be overwritten, what is carried over, and models too large to run as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import decoder as d
import onnx
import pytest
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import (
    ConvertOptions,
    NotConvertible,
    OutputError,
    SourceError,
    VerificationError,
    convert,
    inspect,
    pipeline,
)

OPTIONS = ConvertOptions(max_positions=64)


def external(folder: Path) -> Path:
    folder.mkdir()
    model = d.Decoder(rotate=d.rotary, learned_positions=False).model()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    return folder


def test_missing_and_incomplete_data(tmp_path: Path) -> None:
    source = external(tmp_path / "source")
    data = source / "model.onnx.data"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(SourceError, match="incomplete"):
        convert(source, tmp_path / "out", OPTIONS)
    data.unlink()
    with pytest.raises(SourceError, match=r"model\.onnx\.data"):
        convert(source, tmp_path / "out", OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x07" + bytes(200)])
def test_not_onnx(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises((SourceError, NotConvertible)) as caught:
        convert(tmp_path, tmp_path / "out", OPTIONS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_several_models_need_a_choice(tmp_path: Path) -> None:
    source = d.Decoder().save(tmp_path / "source")
    for name in ("a.onnx", "b.onnx"):
        (source / name).write_bytes((source / "model.onnx").read_bytes())
    (source / "model.onnx").unlink()
    with pytest.raises(SourceError, match=r"a\.onnx, b\.onnx"):
        inspect(source, OPTIONS)
    assert inspect(source / "a.onnx", OPTIONS).convertible


def test_other_content_is_never_overwritten(tmp_path: Path) -> None:
    source = d.Decoder().save(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="other content"):
        convert(source, out, OPTIONS)
    with pytest.raises(OutputError, match="own folder"):
        convert(source, source, OPTIONS)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    (out / "thesis.txt").unlink()
    convert(source, out, OPTIONS)
    convert(source, out, OPTIONS)  # an earlier conversion may be replaced
    assert Manifest.load(out).layers


def test_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = external(tmp_path / "source")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_external_data_and_companions(link: bool, tmp_path: Path) -> None:
    source = external(tmp_path / "source")
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "secret.txt"):
        (source / name).write_text("{}")
    convert(source, tmp_path / "out", ConvertOptions(max_positions=64, link=link))
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names >= {"model.onnx", "model.onnx.data", "pagegraft.json", "config.json", "tokenizer.json"}
    assert "secret.txt" not in names
    same = os.path.samefile(source / "model.onnx.data", tmp_path / "out" / "model.onnx.data")
    assert same == link
    Manifest.load(tmp_path / "out", check_data_digests=True)


def test_too_large_to_run_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = external(tmp_path / "source")
    monkeypatch.setattr(pipeline, "too_large_to_run", lambda _: True)
    report = convert(source, tmp_path / "out", OPTIONS)
    assert "layer slices" in report.verification["scope"]
    assert report.verification["difference"] < 1e-4
    recorded = json.loads((tmp_path / "out" / "pagegraft.json").read_text())["verification"]
    assert recorded["layers"] == 2


def test_slices_catch_a_wrong_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegraft.graphpass.recognise import score

    right = score.fit_visible
    monkeypatch.setattr(score, "fit_visible", lambda rows, name: (right(rows, name) or 9) + 1)
    monkeypatch.setattr(score, "_prove", lambda *_: None)
    monkeypatch.setattr(pipeline, "too_large_to_run", lambda _: True)
    source = d.Decoder(visible=d.window(6)).save(tmp_path / "source")
    with pytest.raises(VerificationError, match="layer 0"):
        convert(source, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


def test_report_as_json(tmp_path: Path) -> None:
    source = d.Decoder(visible=d.window(6)).save(tmp_path / "source")
    report = json.loads(json.dumps(inspect(source, OPTIONS).to_dict()))
    assert report["convertible"]
    assert report["kv_bytes_per_token"] == 2 * 2 * d.HEADS * d.SIZE * 4
    assert [layer["window"] for layer in report["layers"]] == [6, 6]
    assert report["layers"][0]["caches"] == ["past.0.key", "past.0.value"]
    assert report["inputs_before"][0] == "input_ids"
