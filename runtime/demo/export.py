"""Exports SmolLM2-135M-Instruct, or another Llama in a GGUF file, to an ordinary ONNX decoder with past_key_values.

The result is what a PyTorch exporter would have given for the same weights: float32, external data, batch and padding,
the cache as inputs and outputs. It is the demo's source model; torch is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import onnx

from ...custom_ops.files import writing
from .cache import ELSEWHERE, exclusive, new_folder
from .download import GGUF_SHA256, fetch_gguf
from .errors import DemoError
from .gguf_model import GgufModel, Weight, require_gguf_package
from .llama_graph import ExternalTensor, build_decoder
from .model_files import write_configuration, write_tokenizer
from .progress import ProgressReport, no_progress

__all__ = ["SOURCE_NAME", "export_gguf", "export_smollm2"]

SOURCE_NAME = "smollm2-135m-instruct"
_EXPORT_VERSION = 1  # raise it when the exporter's output changes: older cached exports are then made anew
_RECORD = "export.json"
_DATA_FILE = "model.onnx.data"
_ALIGNMENT = 4096  # a page: the file can be mapped into memory tensor by tensor


def export_smollm2(cache_dir: Path, *, progress: ProgressReport = no_progress) -> Path:
    """The folder below `cache_dir` with SmolLM2-135M-Instruct as ONNX; downloaded and exported at the first call.

    About 93 MB are downloaded and 540 MB written. The folder appears when it is complete.

    Raises:
        DemoError: the model cannot be downloaded, or the disk is full or not writable.
    """
    target = cache_dir / SOURCE_NAME
    record = {"export_version": _EXPORT_VERSION, "gguf_sha256": GGUF_SHA256}
    with exclusive(cache_dir):
        if _read_record(target) != record:
            require_gguf_package()
            gguf = fetch_gguf(cache_dir, progress=progress)
            with new_folder(target, advice=f"free 700 MB there, or {ELSEWHERE}") as folder:
                _write_model(GgufModel(gguf), folder, progress)
                (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return target


def export_gguf(gguf: Path, target: Path, *, progress: ProgressReport = no_progress) -> Path:
    """Export any plain Llama GGUF with a byte-level BPE vocabulary into the folder `target`, which must not exist.

    Raises:
        DemoError: the file is not such a model, or `target` exists or cannot be written.
    """
    if target.exists():
        raise DemoError(f"{target} exists already: remove it or name another folder")
    model = GgufModel(gguf)
    advice = "name a new folder where you may write and where there is room"
    with writing(target, DemoError, advice):
        target.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(target, advice=advice) as folder:
        _write_model(model, folder, progress)
    return target


def _read_record(folder: Path) -> object:
    try:
        return json.loads((folder / _RECORD).read_text())
    except (OSError, ValueError):
        return None


def _write_model(model: GgufModel, folder: Path, progress: ProgressReport) -> None:
    folder.mkdir()
    weights = model.weights()
    places = _lay_out(weights)
    vocabulary = model.vocabulary()
    write_tokenizer(folder, vocabulary, context_length=model.shape.context_length)
    write_configuration(folder, model.shape, vocabulary)
    onnx.save(build_decoder(model.shape, places), str(folder / "model.onnx"))
    _write_weights(weights, places, folder / _DATA_FILE, progress)
    onnx.checker.check_model(str(folder / "model.onnx"))


def _lay_out(weights: Sequence[Weight]) -> dict[str, ExternalTensor]:
    places, offset = {}, 0
    for weight in weights:
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        places[weight.name] = ExternalTensor(
            location=_DATA_FILE, offset=offset, length=weight.num_bytes, shape=weight.shape
        )
        offset += weight.num_bytes
    return places


def _write_weights(
    weights: Sequence[Weight], places: dict[str, ExternalTensor], path: Path, progress: ProgressReport
) -> None:
    """Dequantise and write chunk by chunk: no more than one projection is in memory at a time."""
    total = max(place.offset + place.length for place in places.values())
    with path.open("wb") as out:
        for weight in weights:
            out.seek(places[weight.name].offset)
            for chunk in weight.chunks():
                out.write(chunk.astype("<f4", copy=False).data)
                progress("exporting to ONNX", out.tell(), total)
