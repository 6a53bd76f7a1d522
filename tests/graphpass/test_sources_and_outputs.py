"""What is no model, what may not be overwritten, what is carried over, and models too large to run as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import decoder as d
import onnx
import pytest
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import (
    ConvertOptions,
    NotConvertible,
    OptionError,
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


def test_files_beside_an_earlier_conversion_are_kept(tmp_path: Path) -> None:
    source, out = external(tmp_path / "source"), tmp_path / "out"
    convert(source, out, OPTIONS)
    for name in ("thesis.txt", "config.json/mine.txt", "src/model.onnx"):
        extra = out / name
        extra.parent.mkdir(exist_ok=True)
        extra.write_text("mine")
        with pytest.raises(OutputError, match="other content"):
            convert(source, out, OPTIONS)
        assert extra.read_text() == "mine"
        extra.unlink()
        if extra.parent != out:
            extra.parent.rmdir()
    (out / "kv_scales.json").write_text("mine")
    convert(source, out, OPTIONS)
    assert (out / "kv_scales.json").read_text() == "mine"
    assert (out / "model.onnx.data").is_file()


def test_an_output_that_holds_the_source(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(d.Decoder().save(tmp_path / "other"), out, OPTIONS)
    (out / "src").mkdir()
    source = d.Decoder().save(out / "src" / "m")
    for named in (source, source / "model.onnx"):
        with pytest.raises(OutputError, match="holds the source"):
            convert(named, out, OPTIONS)
    linked = tmp_path / "linked"
    linked.symlink_to(source)
    with pytest.raises(OutputError, match="holds the source"):
        convert(linked, out, OPTIONS)
    assert (source / "model.onnx").is_file()


def test_an_output_through_a_link_or_below_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = d.Decoder().save(tmp_path / "source")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert(source, tmp_path / "link", OPTIONS)
    assert Manifest.load(tmp_path / "real").layers
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/x", "file/x/y"):
        with pytest.raises(OutputError, match="is a file"):
            convert(source, tmp_path / out, OPTIONS)
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(OutputError, match="current folder"):
        convert(source, ".", OPTIONS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "real", "source"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = d.Decoder().save(tmp_path / "source"), tmp_path / "out"
    convert(source, out, OPTIONS)
    before = (out / "pagegraft.json").read_bytes()
    rename = Path.rename

    def busy(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(16, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(OutputError, match="busy"):
        convert(source, out, OPTIONS)
    assert (out / "pagegraft.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"block_size": 15}, "power of two up to 512"),
        ({"block_size": 0}, "power of two"),
        ({"block_size": 1024}, "power of two"),
        ({"max_positions": -5}, "at least 1"),
        ({"max_positions": 0}, "at least 1"),
        ({"target": "abacus"}, "ort-cuda"),
    ],
)
def test_options_that_cannot_work(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ConvertOptions(**wrong)


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
    with pytest.raises(VerificationError, match=r"layer 0.*nothing was written"):
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
