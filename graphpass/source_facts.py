"""Facts about a source that the graph alone does not tell: its longest context, its size, what can be run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .analysis import Analysis
from .normalise import Source, external_tensors, load
from .options import ConvertOptions

__all__ = [
    "is_small",
    "longest_context",
    "read_json",
    "too_large_to_run",
    "verification_lengths",
]

#: Keys under which model configurations state their longest context.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
#: Models up to this many bytes are run on a few tokens before anything else, and verified past windows of thousands.
_SMALL = 64 << 20
_STRETCH = 600
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


def _source_bytes(source: Source) -> int:
    """Size of a source's graph and of the data files that it names."""
    files = {source.file}
    if source.file.stat().st_size < _SMALL:  # a large graph holds its weights itself
        files |= {Path(tensor.path) for tensor in external_tensors(load(source))}
    return sum(file.stat().st_size for file in files)


def is_small(source: Source) -> bool:
    """True when running the source costs next to nothing."""
    return _source_bytes(source) <= _SMALL


def too_large_to_run(source: Source) -> bool:
    """True when source and converted model side by side would take more than half of the free memory, or 8 GiB."""
    return _source_bytes(source) * _MEMORY_FACTOR > min(_available_memory() / 2, 8 << 30)


def _available_memory() -> int:
    """Bytes that new processes can have, files kept in memory counted as free (free pages alone may be few)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 8 << 30


def verification_lengths(analysis: Analysis, source: Source, limit: int | None) -> tuple[int, int]:
    """Tokens of the longest of the sequences that verification cuts finely, at most `limit` and past every window where
    that is affordable, and of one further sequence that it cuts coarsely: 0 for none.

    The latter shows what begins late: tables of positions that are wrong from some row on, masks that change.
    """
    small = is_small(source)
    windows = [g.window for g in analysis.groups if g.window is not None]
    capacity = None if analysis.pages is None else analysis.pages.capacity
    longest = max([48, *(w + 20 for w in windows if w <= (4096 if small else 512))])
    longest = min(n for n in (longest, capacity, limit) if n is not None)
    if analysis.pages is not None or analysis.probe.capacities or not small:
        return longest, 0
    stretch = min(_STRETCH, analysis.max_positions or _STRETCH)
    return longest, stretch if stretch > longest else 0
