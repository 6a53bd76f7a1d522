"""`pagegraft inspect` over a folder of models: one table, one exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ZOO = Path(__file__).parents[1] / "data" / "zoo"
COMMAND = [str(Path(sys.executable).parent / "pagegraft"), "inspect"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_folder_of_models(tmp_path: Path) -> None:
    for name in ("llama_gqa__genai", "mistral__opt"):
        shutil.copytree(ZOO / name, tmp_path / "good" / name)
    good = run(str(tmp_path / "good"), "--json")
    assert good.returncode == 0, good.stderr
    reports = {r["model"]: r for r in json.loads(good.stdout)}
    assert reports["mistral__opt"]["layers"][0]["window"] == 8
    assert reports["llama_gqa__genai"]["layers"][0]["form"] == "GroupQueryAttention, packed QKV"

    (tmp_path / "good" / "broken").mkdir()
    (tmp_path / "good" / "broken" / "model.onnx").write_bytes(b"no model")
    mixed = run(str(tmp_path / "good"))
    assert mixed.returncode == 1
    assert "2 of 3 can be converted" in mixed.stdout
    assert "broken" in mixed.stdout


def test_folders_without_a_model_are_no_models(tmp_path: Path) -> None:
    shutil.copytree(ZOO / "mistral__opt", tmp_path / "mistral__opt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "deep" / "below").mkdir(parents=True)
    (tmp_path / "deep" / "below" / "model.onnx").write_bytes(b"of nobody that could be named as `deep`")
    done = run(str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert [r["model"] for r in json.loads(done.stdout)] == ["mistral__opt"]
    assert "2 folders without a model left out" in done.stderr
    assert run(str(tmp_path / "empty")).returncode == 1
