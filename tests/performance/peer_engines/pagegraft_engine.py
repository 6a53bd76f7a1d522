"""pagegraft: its engine, as `pagegraft bench` drives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from job import Job, Measured, Request, perform
from pagegraft.runtime.config import EngineConfig
from pagegraft.runtime.engine.request import Request as EngineRequest
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.loading import load_engine
from pagegraft.runtime.sampling import SamplingParams


def load(job: Job) -> Callable[[list[Request]], Measured]:
    """settings: fields of EngineConfig."""
    model = load_engine(Path(job.model), EngineConfig(num_threads=job.threads, **job.settings))
    engine = model.engine

    def run(requests: list[Request]) -> Measured:
        start = time.perf_counter()
        added = []
        for i, request in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=request.output_length, ignore_eos=True)
            entry = RequestInput(request_id=str(i), prompt_token_ids=tuple(request.prompt), params=params)
            added.append(engine.add(entry))
        first: dict[str, float] = {}
        while engine.has_work:
            changed = engine.step()
            now = time.perf_counter() - start
            for one in changed:
                first.setdefault(one.request_id, now)
        seconds = time.perf_counter() - start
        sequences = [one.choices[0].sequence for one in added if isinstance(one, EngineRequest)]
        outputs = [list(sequence.tokens)[sequence.num_prompt_tokens :] for sequence in sequences]
        times = [first[str(i)] for i in range(len(requests))]
        return Measured(seconds, outputs, times, version("pagegraft"))

    return run


if __name__ == "__main__":
    perform(load)
