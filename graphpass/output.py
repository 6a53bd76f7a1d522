"""Writes the folder of a converted model: all of it or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops.files import writing

from .errors import OutputError
from .genai import CONFIG_FILE
from .normalise import Source, external_tensors
from .unfinished import partial_folder, remove_abandoned, signals_unwind

__all__ = [
    "MODEL_FILE",
    "SCALES_FILE",
    "check_output",
    "data_file_facts",
    "new_folder",
    "save_with_data",
    "write_model",
]

MODEL_FILE = "model.onnx"
SCALES_FILE = "kv_scales.json"
#: Weights inside the .onnx file are moved to a data file of their own above this many bytes.
_LARGEST_INLINE = 256 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


#: What a folder of ours may hold beside the files that its manifest names. Scales are where `calibrate` puts them.
_OURS = frozenset({*_CARRIED, names.MANIFEST_FILE, CONFIG_FILE, SCALES_FILE})


def check_output(out: Path, source: Source) -> None:
    """Raises OutputError when the resolved `out` must not be written.

    That is a file, a folder that holds anything but an earlier conversion, or one that holds the source.
    """
    for place in (source.folder.resolve(), source.file.resolve().parent):
        if place == out:
            raise OutputError(f"{out} is the source's own folder; name another output folder")
        if out in place.parents:
            raise OutputError(f"{out} holds the source {source.file}; name another output folder")
    nearest = next(place for place in (out, *out.parents) if place.exists())
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file; name a folder for the converted model")
    _check_replaceable(out)


def _check_replaceable(out: Path) -> None:
    """Raises OutputError when there is an `out` with anything in it that no conversion wrote."""
    if not out.is_dir():
        return
    if out.samefile("."):
        raise OutputError(f"{out} is the current folder, which cannot be replaced; name a folder in it")
    ours = _files_of_conversion(out)
    for entry in sorted(out.rglob("*")):
        name = entry.relative_to(out).as_posix()
        inner = entry.is_dir() and not entry.is_symlink()
        if name not in ours and not (inner and any(file.startswith(f"{name}/") for file in ours)):
            raise OutputError(f"{out} exists and holds other content ({name}); name a new folder, or empty this one")


def _files_of_conversion(out: Path) -> frozenset[str]:
    """Paths within `out` of what its manifest says was written there; none without a manifest."""
    try:
        raw = json.loads((out / names.MANIFEST_FILE).read_text(encoding="utf-8"))
        return _OURS | {str(raw["model_file"])} | {Path(name).as_posix() for name in raw["data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out` that takes its place when the block succeeds, and vanishes when it does not.

    An earlier conversion's calibrated scales stay, and what killed processes left of attempts at `out` goes. Raises
    OutputError when the folder cannot be made, written or replaced.
    """
    with signals_unwind(), ExitStack() as stack:
        with writing(out, OutputError, "name another output folder"):
            out.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(out)
            partial = stack.enter_context(partial_folder(out))
        with _full_disk_named(out):
            yield partial
        _check_replaceable(out)
        with writing(out, OutputError, "name another output folder"):
            _take_place(partial, out)


@contextmanager
def _full_disk_named(out: Path) -> Iterator[None]:
    """Writing may fail for lack of room, in whichever of its libraries; other errors there are not of the output."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in _NO_ROOM):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise OutputError(
            f"{out} cannot be written ({os.strerror(cause.errno or 0)}); free space there, or convert with --link"
        ) from None


def _take_place(partial: Path, out: Path) -> None:
    if not out.is_dir():
        partial.rename(out)
        return
    if (out / SCALES_FILE).is_file():
        shutil.copyfile(out / SCALES_FILE, partial / SCALES_FILE)
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        if not out.exists():
            old.rename(out)
        raise
    finally:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


def write_model(model: ir.Model, source: Source, folder: Path, *, link: bool) -> list[str]:
    """Writes graph, data files and what is carried over. Returns the names of the data files.

    External data is copied (or hard-linked) file by file, never through memory.
    """
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    if any(isinstance(tensor, ir.LazyTensor) for tensor in tensors):
        # Weights that change on their way (bfloat16 to float32) cannot share the source's files.
        save_with_data(model, folder / MODEL_FILE)
        files = [f"{MODEL_FILE}.data"]
        carry_over(source, folder)
        return files
    files = sorted({str(tensor.location) for tensor in external_tensors(model)})
    for name in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source.folder / name, target, link=link)
    inline = sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, ir.ExternalTensor))
    if not files and inline > _LARGEST_INLINE:
        save_with_data(model, folder / MODEL_FILE)
        files = [f"{MODEL_FILE}.data"]
    else:
        ir.save(model, folder / MODEL_FILE)
    carry_over(source, folder)
    return files


def save_with_data(model: ir.Model, file: Path) -> None:
    """Writes a graph with its weights in one data file beside it, one weight at a time."""
    ir.save(model, file, external_data=f"{file.name}.data", size_threshold_bytes=1024, max_workers=1)


def _copy(source: Path, target: Path, *, link: bool) -> None:
    real = source.resolve()
    if link:
        try:
            os.link(real, target)
        except OSError as error:
            raise OutputError(
                f"{source} cannot be hard-linked to {target.parent} ({error.strerror}); convert without --link"
            ) from None
    else:
        shutil.copyfile(real, target)


def carry_over(source: Source, folder: Path) -> None:
    """Copies config, tokenizer and chat template, from beside the model or from the folder above it."""
    for name in _CARRIED:
        for place in (source.folder, source.folder.parent if source.folder.name == "onnx" else None):
            if place is not None and (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
                break


def data_file_facts(folder: Path, files: list[str], *, digests: bool) -> dict[str, dict[str, Any]]:
    """Size (and digest when wanted) of each data file, for the manifest."""
    facts: dict[str, dict[str, Any]] = {}
    for name in files:
        facts[name] = {"size": (folder / name).stat().st_size}
        if digests:
            facts[name]["digest"] = names.file_digest(folder / name)
    return facts
