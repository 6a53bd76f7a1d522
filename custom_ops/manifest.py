"""The interface of a converted model: names of its inputs and outputs, and the manifest `pagegraft.json` beside it.

The graph pass writes it, the runtime reads it; neither imports the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .errors import ManifestError
from .spec import MAX_BLOCK_SIZE

__all__ = [
    "CUMULATIVE",
    "INPUT_IDS",
    "LOGITS",
    "LOGITS_INDICES",
    "MANIFEST_FILE",
    "PAST",
    "POSITION_IDS",
    "CacheGroup",
    "CacheLayer",
    "Manifest",
    "block_table_name",
    "cache_name",
    "file_digest",
    "is_block_size",
    "slot_mapping_name",
]

MANIFEST_FILE: Final = "pagegraft.json"
FORMAT_VERSION: Final = 1

INPUT_IDS: Final = "input_ids"  # [T] int64
POSITION_IDS: Final = "position_ids"  # [T] int64
CUMULATIVE: Final = "cumulative_sequence_lengths"  # [S+1] int32
PAST: Final = "past_sequence_lengths"  # [S] int32
LOGITS_INDICES: Final = "logits_indices"  # [R] int32, rows of the packed tokens whose logits are wanted
LOGITS: Final = "logits"  # [R, vocab]


def _group_suffix(windowed: int) -> str:
    if windowed == 0:
        return ""
    return "_windowed" if windowed == 1 else f"_windowed_{windowed}"


def block_table_name(windowed: int) -> str:
    """Input name of a group's block table `[S, M]`: 0 is the plain one, 1 the first windowed one beside it, ..."""
    return "block_table" + _group_suffix(windowed)


def slot_mapping_name(windowed: int) -> str:
    """Input name of a group's slot mapping `[T]`, numbered as in `block_table_name`."""
    return "slot_mapping" + _group_suffix(windowed)


def cache_name(layer: int, part: str, *, present: bool = False) -> str:
    """`past_key_values.<layer>.<part>` or `present.<layer>.<part>`; part: key, value, key_scale or value_scale."""
    return f"{'present' if present else 'past_key_values'}.{layer}.{part}"


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers with one retention rule: they share a block-id space, a pool, a block table and slots.

    `window` None keeps all tokens; W means no reader ever looks further back than W tokens, itself included.
    """

    window: int | None
    layers: tuple[int, ...]
    block_table: str
    slot_mapping: str


@dataclass(frozen=True, kw_only=True)
class CacheLayer:
    """One pair of cache tensors, `[N, B, kv_heads, head size]`; `value_head_size` None when LATENT (no value cache).

    `key_dtype`/`value_dtype` are logical types of `spec.CACHE_DTYPES`; `quant` is NONE, PER_TENSOR, PER_CHANNEL or
    PER_TOKEN. Only PER_TOKEN layers have `.key_scale`/`.value_scale` inputs, `[N, kv_heads, B]` float32.
    """

    group: int
    kv_heads: int
    key_head_size: int
    value_head_size: int | None
    key_dtype: str
    value_dtype: str | None
    quant: str = "NONE"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the runtime has to know of a converted model.

    `positions` says which source of positions is live: "position_ids" (the graph input), "past" (computed in the op or
    the graph from the past lengths) or "none". `max_positions` is the longest context in tokens, None when unlimited.
    `graph_digest` is the sha256 of the model file; `data_files` maps each external-data file to its size and digest.
    """

    model_file: str
    graph_digest: str
    groups: tuple[CacheGroup, ...]
    layers: tuple[CacheLayer, ...]
    positions: Literal["position_ids", "past", "none"]
    vocab_size: int
    compute_dtype: str
    max_positions: int | None = None
    default_block_size: int = 16
    target: str = "cpu"
    data_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    verification: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def save(self, folder: Path) -> None:
        """Writes the manifest into `folder`."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, check_data_digests: bool = False) -> Manifest:
        """Reads and checks a converted model's folder.

        The graph is checked by digest, data files by size, or by digest too with `check_data_digests`.
        Raises ManifestError when a file is missing, altered, or of another format version.
        """
        manifest = cls._read(folder)
        model = folder / manifest.model_file
        if not model.is_file():
            raise ManifestError(f"{model} is missing; convert the source model again")
        if file_digest(model) != manifest.graph_digest:
            raise ManifestError(
                f"{model} is not the file that {MANIFEST_FILE} describes (its digest differs): it was altered after "
                "conversion; convert the source model again"
            )
        for name, facts in manifest.data_files.items():
            _check_data_file(folder / name, facts, by_digest=check_data_digests)
        return manifest

    @classmethod
    def _read(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST_FILE
        if not folder.is_dir():
            raise ManifestError(f"{folder} is no folder; give the folder that `pagegraft convert` wrote")
        if not path.is_file():
            raise ManifestError(
                f"{folder} holds no converted model ({MANIFEST_FILE} is missing); make one with: "
                f"pagegraft convert SOURCE {folder}"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ManifestError(f"{path} is not valid JSON ({error}); convert the source model again") from None
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if version != FORMAT_VERSION:
            raise ManifestError(
                f"{path} has format version {version}, this pagegraft reads {FORMAT_VERSION}; convert the source "
                "model again"
            )
        try:
            raw["groups"] = tuple(CacheGroup(**{**g, "layers": tuple(g["layers"])}) for g in raw["groups"])
            raw["layers"] = tuple(CacheLayer(**layer) for layer in raw["layers"])
            manifest = cls(**raw)
        except (KeyError, TypeError) as error:
            raise ManifestError(f"{path} is damaged ({error}); convert the source model again") from None
        if not is_block_size(manifest.default_block_size):
            raise ManifestError(
                f"{path} has default_block_size {manifest.default_block_size!r}, which is no power of two up to "
                f"{MAX_BLOCK_SIZE}; convert the source model again"
            )
        return manifest


def _check_data_file(path: Path, facts: Mapping[str, Any], *, by_digest: bool) -> None:
    if not path.is_file():
        raise ManifestError(f"{path} is missing; convert the source model again")
    if path.stat().st_size != facts["size"]:
        raise ManifestError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {facts['size']}; convert the source model again"
        )
    if by_digest and facts.get("digest") and file_digest(path) != facts["digest"]:
        raise ManifestError(f"{path} was altered after conversion (its digest differs); convert the source model again")


def file_digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_block_size(value: object) -> bool:
    """Whether a value is a number of tokens that a block may have: a power of two up to `spec.MAX_BLOCK_SIZE`."""
    return isinstance(value, int) and 1 <= value <= MAX_BLOCK_SIZE and value & (value - 1) == 0
