"""Facts about a source that the graph alone does not tell: its longest context, its size, what can be run here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .analysis import Analysis
from .normalise import Source, external_tensors, load
from .options import ConvertOptions

__all__ = ["longest_context", "read_json", "source_bytes", "too_large_to_run", "verification_length"]

#: Keys under which model configurations state their longest context.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
#: Models below this many bytes are verified past windows of thousands of tokens.
_SMALL_MODEL = 64 << 20
#: Memory that two sessions take, in multiples of the source's bytes: weights, and products packed for the processor.
_MEMORY_FACTOR = 3.0


def longest_context(source: Source, options: ConvertOptions) -> int | None:
    """The longest context in tokens: the option, or what the source's configuration says, or None."""
    if options.max_positions is not None:
        return options.max_positions
    for folder in (source.folder, source.folder.parent if source.folder.name == "onnx" else source.folder):
        config = read_json(folder / "config.json")
        for part in (config, config.get("text_config", {})):
            for key in _LENGTH_KEYS:
                if isinstance(part, dict) and isinstance(part.get(key), int):
                    return int(part[key])
        length = read_json(folder / "genai_config.json").get("model", {}).get("context_length")
        if isinstance(length, int):
            return length
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when the file is missing or none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def source_bytes(source: Source) -> int:
    """Size of a source's graph and of the data files that it names."""
    files = {source.file}
    if source.file.stat().st_size < _SMALL_MODEL:  # a large graph holds its weights itself
        files |= {Path(tensor.path) for tensor in external_tensors(load(source))}
    return sum(file.stat().st_size for file in files)


def too_large_to_run(source: Source) -> bool:
    """True when source and converted model side by side would take more than half of the free memory, or 8 GiB."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = 8 << 30
    return source_bytes(source) * _MEMORY_FACTOR > min(free / 2, 8 << 30)


def verification_length(analysis: Analysis, source: Source) -> int:
    """Tokens of the longest sequence that verification runs: past every window where that is affordable."""
    affordable = 4096 if source_bytes(source) < _SMALL_MODEL else 512
    windows = [g.window for g in analysis.groups if g.window is not None]
    length = max([48, *(w + 20 for w in windows if w <= affordable)])
    capacity = None if analysis.pages is None else analysis.pages.capacity
    return length if capacity is None else min(length, capacity)
