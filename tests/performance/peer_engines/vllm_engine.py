"""vLLM on CPU: LLM.generate in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version

from job import Job, Measured, Request, perform


def load(job: Job) -> Callable[[list[Request]], Measured]:
    """settings: arguments of LLM, beside `kv_gib`, the GiB of cache."""
    settings = dict(job.settings)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.pop("kv_gib"))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(job.threads)))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(job.model, disable_log_stats=False, **settings)

    def run(requests: list[Request]) -> Measured:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.output_length, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        outputs = [result.outputs[0].token_ids for result in results]
        times = [result.metrics for result in results]
        first = [t.first_token_ts - t.queued_ts for t in times] if all(times) else None
        return Measured(seconds, outputs, first, version("vllm-cpu"))

    return run


if __name__ == "__main__":
    perform(load)
