"""What a shared prefix saves on a real model, in tokens computed and in time; ratios within one run.

    python -m tests.performance.prefix_sharing MODEL [--repeats 3] [--json FILE]

MODEL is a folder that `pagegraft convert` wrote (SmolLM2-135M for the figures in the README).

* *together*: 16 requests arrive at once, cold: 512 tokens in common (never seen before), 8 to 32 of their own, 16
  tokens of output each. Wall time until the last has ended, against the same requests in an engine without prefix
  caching; the two take turns, medians of `--repeats`. Targets: the prefix is computed once; at most 0.35 of the time.
* *in a row*: 512 requests that share 512 tokens and have 8 of their own, each arriving when the one before has ended
  (2 tokens of output). Time to first token of the second to the last, against the first's. Target: the slowest of them
  takes at most a fifth.
* *eight at a time*: the same with always eight unfinished, which is how a server sees them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.request import Request, RequestInput

PREFIX = 512
TOGETHER, TOGETHER_OUTPUT, OWN = 16, 16, (8, 32)
ROW, ROW_OUTPUT, ROW_OWN = 512, 2, 8
WALL_TARGET, FIRST_TOKEN_TARGET = 0.35, 0.2


def together_prompts(vocab: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens with one prefix."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab, PREFIX).tolist()
    return [prefix + rng.integers(0, vocab, int(rng.integers(OWN[0], OWN[1] + 1))).tolist() for _ in range(TOGETHER)]


def submit(llm: LLM, name: str, prompt: Sequence[int], output: int) -> Request:
    """Queues a greedy request of a fixed length."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    request = llm.engine.add(RequestInput(request_id=name, prompt_token_ids=prompt, params=params))
    assert isinstance(request, Request)
    return request


def run_together(llm: LLM, prompts: list[list[int]]) -> tuple[float, int, list[list[int]]]:
    """Seconds, tokens computed, and the outputs."""
    computed = llm.engine.scheduler.counters.computed_tokens
    start = time.perf_counter()
    requests = [submit(llm, str(i), prompt, TOGETHER_OUTPUT) for i, prompt in enumerate(prompts)]
    while llm.engine.has_work:
        llm.engine.step()
    seconds = time.perf_counter() - start
    outputs = [list(request.output().outputs[0].token_ids) for request in requests]
    return seconds, llm.engine.scheduler.counters.computed_tokens - computed, outputs


def together(model: Path, repeats: int, threads: int | None) -> dict[str, Any]:
    """Sixteen requests at once, with and without prefix caching in turn."""
    settings: dict[str, Any] = {"kv_memory": "1GiB", "num_threads": threads}
    shared, alone, ratios, computed, wanted = [], [], [], set(), set()
    differing = 0
    with LLM(model, **settings) as on, LLM(model, enable_prefix_caching=False, **settings) as off:
        vocab = on.model.manifest.vocab_size
        for llm in (on, off):
            run_together(llm, together_prompts(vocab, 999)[:2])
        for seed in range(repeats):
            prompts = together_prompts(vocab, seed)
            seconds, tokens, outputs = run_together(on, prompts)
            seconds_off, _, outputs_off = run_together(off, prompts)
            own = sum(len(prompt) - PREFIX + TOGETHER_OUTPUT - 1 for prompt in prompts)
            computed.add(tokens - own)
            wanted.add(PREFIX)
            differing += sum(a != b for a, b in zip(outputs, outputs_off, strict=True))
            shared.append(seconds)
            alone.append(seconds_off)
            ratios.append(seconds / seconds_off)
    return {
        "requests": TOGETHER,
        "seconds": statistics.median(shared),
        "seconds_without_caching": statistics.median(alone),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "computed_once": computed == wanted,
        "outputs_that_differ": differing,
    }


def in_a_row(llm: LLM, at_once: int, seed: int) -> dict[str, Any]:
    """`ROW` requests, so many unfinished at any time but for the first, which is alone; milliseconds."""
    rng = np.random.default_rng(seed)
    vocab = llm.model.manifest.vocab_size
    prefix = rng.integers(0, vocab, PREFIX).tolist()
    computed = llm.engine.scheduler.counters.computed_tokens
    requests: list[Request] = []
    while len(requests) < ROW or llm.engine.has_work:
        allowed = at_once if len(requests) > 1 or (requests and requests[0].is_finished) else 1
        while len(requests) < ROW and llm.engine.num_requests < allowed:
            own = rng.integers(0, vocab, ROW_OWN).tolist()
            requests.append(submit(llm, f"{seed}.{len(requests)}", prefix + own, ROW_OUTPUT))
        llm.engine.step()
    waits = [1e3 * ((r.first_token_time or 0.0) - r.arrival_time) for r in requests]
    first, others = waits[0], waits[1:]
    computed = llm.engine.scheduler.counters.computed_tokens - computed
    return {
        "unfinished_at_once": at_once,
        "first_ms": first,
        "others_p50_ms": statistics.median(others),
        "others_p99_ms": float(np.percentile(others, 99)),
        "others_max_ms": max(others),
        "last_ms": others[-1],
        "worst_ratio": max(others) / first,
        "over_a_fifth": sum(wait > FIRST_TOKEN_TARGET * first for wait in others),
        "computed_once": computed == PREFIX + ROW * (ROW_OWN + ROW_OUTPUT - 1),
    }


def main() -> None:
    """Prints the figures as JSON; ends with 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"together": together(arguments.model, arguments.repeats, arguments.threads)}
    with LLM(arguments.model, kv_memory="1GiB", num_threads=arguments.threads) as llm:
        llm.generate({"prompt_token_ids": [1] * 200}, SamplingParams(temperature=0.0, max_tokens=2))
        figures["in_a_row"] = in_a_row(llm, 1, 1)
        figures["eight_at_a_time"] = in_a_row(llm, 8, 2)
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    met = figures["together"]["computed_once"] and figures["together"]["ratio"] <= WALL_TARGET
    sys.exit(not (met and figures["in_a_row"]["over_a_fifth"] == 0 and figures["in_a_row"]["computed_once"]))


if __name__ == "__main__":
    main()
