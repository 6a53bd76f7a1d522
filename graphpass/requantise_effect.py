"""What quantising activations per token changes: the source with it against the source as it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .normalise import Source
from .oracle import source_model
from .passes import Analysis
from .verify import make_schedule

__all__ = ["requantise_effect"]

_LONGEST = 48


def requantise_effect(
    source: Source, analysis: Analysis, scratch: Path, *, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Logits of random sequences, each given to the source at once as it is, and requantised.

    Errors are relative to the standard deviation of all logits; `greedy_agreement` is the share of tokens after which
    both choose the same next one; `source_by_chunks_rms` is what the source as given differs from itself when the same
    tokens come in chunks of seven (None for a source without past).
    """
    progress("measuring what quantisation per token changes")
    sequences = make_schedule(analysis.token_count, min(_LONGEST, analysis.max_positions or _LONGEST)).sequences
    with source_model(source, analysis, scratch) as oracle:
        requantised = np.concatenate([oracle.logits(tokens) for tokens in sequences])
    by_chunks = None
    with source_model(source, analysis, scratch, as_given=True) as given:
        whole = np.concatenate([given.logits(tokens) for tokens in sequences])
        if analysis.probe.has_past:
            by_chunks = np.concatenate([given.logits(tokens, chunk=7) for tokens in sequences])
    deviation = float(np.std(whole)) or 1.0
    gap = np.abs(requantised.astype(np.float64) - whole)
    return {
        "activations": analysis.requantised,
        "tokens": len(whole),
        "logit_error_rms": float(np.sqrt(np.mean(gap**2))) / deviation,
        "logit_error_max": float(np.max(gap)) / deviation,
        "greedy_agreement": float(np.mean(requantised.argmax(-1) == whole.argmax(-1))),
        "source_by_chunks_rms": None
        if by_chunks is None
        else float(np.sqrt(np.mean((by_chunks.astype(np.float64) - whole) ** 2))) / deviation,
    }
