"""onnxruntime-genai: its Generator on padded batches, on a folder made by its model builder.

Its continuous batching wants a model with `PagedAttention` nodes, for which onnxruntime has no CPU kernel. A batch runs
until its longest output is complete, as Generator has no way to leave a row out: outputs are cut to the lengths wanted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai
from job import Job, Measured, Request, perform


def load(job: Job) -> Callable[[list[Request]], Measured]:
    """settings: `batch`, and `sort` to order requests by output length first, which no server knows beforehand."""
    config = onnxruntime_genai.Config(job.model)
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {job.threads}}}}}}}}}')
    model = onnxruntime_genai.Model(config)
    batch = job.settings["batch"]
    padding = json.loads((Path(job.model) / "genai_config.json").read_text())["model"]["pad_token_id"]

    def run(requests: list[Request]) -> Measured:
        order = list(range(len(requests)))
        if job.settings["sort"]:
            order.sort(key=lambda i: requests[i].output_length)
        outputs: list[list[int]] = [[] for _ in requests]
        start = time.perf_counter()
        for at in range(0, len(order), batch):
            chosen = [requests[i] for i in order[at : at + batch]]
            for i, output in zip(order[at : at + batch], _generate(model, chosen, padding), strict=True):
                outputs[i] = output
        return Measured(time.perf_counter() - start, outputs, None, version("onnxruntime-genai"))

    return run


def _generate(model: onnxruntime_genai.Model, requests: list[Request], padding: int) -> list[list[int]]:
    prompt = max(len(request.prompt) for request in requests)
    longest = max(request.output_length for request in requests)
    padded = np.full((len(requests), prompt), padding, np.int32)  # on the right, as its own tokenizer pads
    for row, request in zip(padded, requests, strict=True):
        row[: len(request.prompt)] = request.prompt
    params = onnxruntime_genai.GeneratorParams(model)
    total = prompt + longest
    params.set_search_options(batch_size=len(requests), do_sample=False, min_length=total, max_length=total)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(padded)
    while not generator.is_done():
        generator.generate_next_token()
    return [
        generator.get_sequence(row)[prompt : prompt + request.output_length].tolist()
        for row, request in enumerate(requests)
    ]


if __name__ == "__main__":
    perform(load)
