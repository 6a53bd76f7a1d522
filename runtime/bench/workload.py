"""What a benchmark run asks: prompts of random tokens, lengths, arrivals. The same seed gives the same workload."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import ConfigurationError

__all__ = ["BenchRequest", "LengthRange", "WorkloadOptions", "make_workload"]


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn log-uniformly from [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Reads "A:B" or "A". Raises ConfigurationError."""
        parts = text.split(":")
        try:
            low, high = int(parts[0]), int(parts[-1])
        except ValueError:
            low, high = 0, 0
        if len(parts) > 2 or not 1 <= low <= high:
            raise ConfigurationError(f"'{text}' is no range of lengths; write it like 16:512, or 64")
        return cls(low, high)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        logs = rng.uniform(np.log(self.low), np.log(self.high + 1), count)
        return [min(self.high, int(x)) for x in np.exp(logs)]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `arrival` in seconds from the start of the run."""

    prompt: tuple[int, ...]
    output_length: int
    arrival: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """rate: requests a second (Poisson); None lets all arrive at once. trace: a file of JSON lines with `arrival`,
    `prompt_len` and `output_len`, which replaces rate, lengths and number. shared_prefix: tokens that all prompts
    begin with, beside their own length. Raises ConfigurationError for numbers that make no workload."""

    requests: int = 100
    prompt_len: LengthRange = LengthRange(16, 512)
    output_len: LengthRange = LengthRange(16, 256)
    shared_prefix: int = 0
    rate: float | None = None
    trace: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("shared_prefix", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigurationError(f"rate={self.rate}: must be a positive number of requests a second")


def make_workload(options: WorkloadOptions, vocab_size: int) -> list[BenchRequest]:
    """The requests in order of arrival. Raises ConfigurationError for a trace that cannot be read."""
    rng = np.random.default_rng(options.seed)
    if options.trace is not None:
        rows = _read_trace(options.trace)
    else:
        count = options.requests
        gaps = np.zeros(count) if options.rate is None else rng.exponential(1.0 / options.rate, count)
        rows = list(
            zip(
                np.cumsum(gaps).tolist(),
                options.prompt_len.draw(rng, count),
                options.output_len.draw(rng, count),
                strict=True,
            )
        )
    prefix = rng.integers(0, vocab_size, options.shared_prefix).tolist()
    out = []
    for arrival, prompt_length, output_length in rows:
        own = rng.integers(0, vocab_size, prompt_length).tolist()
        out.append(BenchRequest((*prefix, *own), output_length, arrival))
    return out


def _read_trace(path: Path) -> list[tuple[float, int, int]]:
    rows = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                entry = json.loads(line)
                rows.append(_trace_row(entry))
        if not rows:
            raise ValueError("it has no lines")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no trace ({type(error).__name__}: {error}); each line must be like "
            '{"arrival": 0.5, "prompt_len": 64, "output_len": 32}'
        ) from error
    return sorted(rows)


def _trace_row(entry: dict[str, Any]) -> tuple[float, int, int]:
    arrival, prompt, output = float(entry["arrival"]), int(entry["prompt_len"]), int(entry["output_len"])
    if not (0 <= arrival < float("inf") and prompt >= 1 and output >= 1):
        raise ValueError(f"arrival {arrival}, prompt_len {prompt} or output_len {output} is too small or no number")
    return arrival, prompt, output
