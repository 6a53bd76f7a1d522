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
