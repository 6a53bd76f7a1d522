"""What every engine module is given and gives back; it runs in the engines' own environments, so imports little.

A module is started as `python MODULE.py JOB.json RESULT.json`; it loads the model, warms up on two short requests,
and measures from the moment all requests are handed over to the last token.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "Measured", "Request", "perform"]


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt tokens, and how many tokens to generate whatever they are."""

    prompt: list[int]
    output_length: int


@dataclass(frozen=True, slots=True)
class Job:
    """model: a file or folder in the form the engine reads. settings: the engine's own, by contender."""

    model: str
    threads: int
    requests: list[Request]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """outputs: tokens of each request, in the order given; first: seconds from the start to the first token of each,
    None where the engine does not tell."""

    seconds: float
    outputs: Sequence[Sequence[int]]
    first: Sequence[float] | None = None
    version: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def perform(load: Callable[[Job], Callable[[list[Request]], Measured]]) -> None:
    """The whole of a module's main program: `load` gives the function that runs requests."""
    job_file, result_file = sys.argv[1:3]
    text = json.loads(Path(job_file).read_text())
    requests = [Request(*entry) for entry in text.pop("requests")]
    job = Job(requests=requests, **text)
    start = time.perf_counter()
    run = load(job)
    run([Request(requests[0].prompt[:16], 3), Request(requests[-1].prompt[:9], 3)])
    load_seconds = time.perf_counter() - start
    measured = run(requests)
    short = [
        f"request {i}: {len(output)} tokens, wanted {request.output_length}"
        for i, (output, request) in enumerate(zip(measured.outputs, requests, strict=True))
        if len(output) != request.output_length
    ]
    if short:
        sys.exit(f"{len(short)} outputs have a wrong length, the first is {short[0]}")
    result = {
        "seconds": measured.seconds,
        "output_tokens": sum(map(len, measured.outputs)),
        "first_token_seconds": list(measured.first) if measured.first is not None else None,
        "outputs": [list(map(int, output)) for output in measured.outputs],
        "version": measured.version,
        "notes": measured.notes,
        "load_seconds": load_seconds,
    }
    Path(result_file).write_text(json.dumps(result))
