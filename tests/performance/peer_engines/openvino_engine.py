"""OpenVINO GenAI: ContinuousBatchingPipeline on CPU, on a folder with OpenVINO IR."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai
from job import Job, Measured, Request, perform


def load(job: Job) -> Callable[[list[Request]], Measured]:
    """settings: `scheduler`, fields of SchedulerConfig; `properties` of the CPU device."""
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in job.settings["scheduler"].items():
        setattr(scheduler, name, value)
    properties = {"INFERENCE_NUM_THREADS": job.threads, **job.settings["properties"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)

    def run(requests: list[Request]) -> Measured:
        start = time.perf_counter()
        handles = []
        for i, request in enumerate(requests):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request.output_length
            config.ignore_eos = True
            config.do_sample = False
            prompt = openvino.Tensor(np.array([request.prompt], np.int64))
            handles.append(pipeline.add_request(i, prompt, config))
        first = [0.0] * len(requests)
        waiting = list(range(len(requests)))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for i in waiting:
                if handles[i].can_read():
                    first[i] = now
            waiting = [i for i in waiting if not first[i]]
        seconds = time.perf_counter() - start
        outputs = [handle.read_all()[0].generated_ids for handle in handles]
        return Measured(seconds, outputs, first, version("openvino-genai"))

    return run


if __name__ == "__main__":
    perform(load)
