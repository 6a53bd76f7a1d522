"""The unconverted model in plain onnxruntime, padded static batches: the baseline of `pagegraft bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
from job import Job, Measured, Request, perform
from pagegraft.runtime.bench.static_baseline import StaticModel, find_model


def load(job: Job) -> Callable[[list[Request]], Measured]:
    """settings: `batch`, and `sort` to order requests by length first."""
    model = StaticModel(find_model(Path(job.model)), num_threads=job.threads)
    batch = job.settings["batch"]

    def run(requests: list[Request]) -> Measured:
        order = list(range(len(requests)))
        if job.settings["sort"]:
            order.sort(key=lambda i: len(requests[i].prompt) + requests[i].output_length)
        outputs: list[list[int]] = [[] for _ in requests]
        start = time.perf_counter()
        for at in range(0, len(order), batch):
            chosen = order[at : at + batch]
            lengths = [requests[i].output_length for i in chosen]
            results = model.generate([requests[i].prompt for i in chosen], lengths, ends=frozenset())
            for i, output in zip(chosen, results, strict=True):
                outputs[i] = output
        return Measured(time.perf_counter() - start, outputs, None, onnxruntime.__version__)

    return run


if __name__ == "__main__":
    perform(load)
