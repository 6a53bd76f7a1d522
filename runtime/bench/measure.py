"""Runs a workload through an engine and measures it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..engine.errors import StepError
from ..engine.request import Request, RequestInput
from ..sampling import SamplingParams
from .workload import BenchRequest

__all__ = ["BenchResult", "Percentiles", "run_workload"]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a list of milliseconds; None when it was empty."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Percentiles of times in seconds."""
        if not seconds:
            return cls()
        values = np.asarray(seconds) * 1e3
        return cls(float(values.mean()), *(float(np.percentile(values, q)) for q in (50, 90, 99)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """One run. KV utilisation is live tokens, each shared block once, over slots of owned blocks.

    prefix_hit_rate: prompt tokens found in the cache over prompt tokens. concurrency_mean: running sequences a step.
    """

    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    steps: int
    throughput_tok_s: float
    total_tok_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    kv_utilization_mean: float
    kv_utilization_peak: float
    kv_memory_bytes: int
    concurrency_mean: float
    concurrency_peak: int
    preemptions: int
    prefix_hit_rate: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Times:
    """When the tokens of a request came, in seconds."""

    arrival: float
    tokens: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Seen:
    """What was observed of a run, a value each step."""

    utilisation: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    seconds: float = 0.0
    counts: list[int] = field(default_factory=list)


def run_workload(engine: Engine, workload: Sequence[BenchRequest], *, ignore_eos: bool, kv_bytes: int) -> BenchResult:
    """Runs all requests, greedily, each entering at its arrival; returns when the last has ended.

    Raises StepError when the model failed on one of them: figures of such a run mean nothing.
    """
    before = _counters(engine)
    times: dict[str, _Times] = {}
    requests: list[Request] = []
    seen = _Seen()
    pending = list(reversed(workload))
    start = time.perf_counter()
    while pending or engine.has_work:
        now = time.perf_counter() - start
        while pending and pending[-1].arrival <= now:
            item = pending.pop()
            times[str(len(times))] = _Times(item.arrival)
            requests.append(_add(engine, item, str(len(times) - 1), ignore_eos=ignore_eos))
        if not engine.has_work:
            time.sleep(max(0.0, min(0.01, pending[-1].arrival - now)))
            continue
        changed = engine.step()
        now = time.perf_counter() - start
        for request in changed:
            times[request.request_id].tokens.append(now)
        seen.utilisation.append(engine.kv_utilisation())
        seen.running.append(len(engine.scheduler.running))
    seen.seconds = time.perf_counter() - start
    errors = [r.choices[0].error or "" for r in requests if r.choices[0].sequence.finish_reason == "error"]
    if errors:
        raise StepError(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}")
    seen.counts = [now - then for now, then in zip(_counters(engine), before, strict=True)]
    return _result(requests, list(times.values()), seen, kv_bytes)


def _add(engine: Engine, item: BenchRequest, request_id: str, *, ignore_eos: bool) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=item.output_length, ignore_eos=ignore_eos)
    request = engine.add(RequestInput(request_id=request_id, prompt_token_ids=item.prompt, params=params))
    if not isinstance(request, Request):
        raise TypeError("a benchmark request is no beam search")
    return request


def _counters(engine: Engine) -> tuple[int, int, int, int, int]:
    c = engine.scheduler.counters
    return c.preemptions, c.prefix_queries, c.prefix_hits, c.computed_tokens, c.steps


def _result(requests: list[Request], times: list[_Times], seen: _Seen, kv_bytes: int) -> BenchResult:
    preemptions, queries, hits, computed, steps = seen.counts
    seconds, utilisation, running = seen.seconds, seen.utilisation, seen.running
    prompt_tokens = sum(len(r.source.prompt_token_ids) for r in requests)
    output_tokens = sum(r.choices[0].sampling.num_output_tokens for r in requests)
    gaps = [b - a for t in times for a, b in zip(t.tokens, t.tokens[1:], strict=False)]
    return BenchResult(
        requests=len(requests),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        computed_tokens=computed,
        steps=steps,
        throughput_tok_s=output_tokens / seconds,
        total_tok_s=(prompt_tokens + output_tokens) / seconds,
        ttft_ms=Percentiles.of([t.tokens[0] - t.arrival for t in times if t.tokens]),
        itl_ms=Percentiles.of(gaps),
        kv_utilization_mean=float(np.mean(utilisation)) if utilisation else 0.0,
        kv_utilization_peak=max(utilisation, default=0.0),
        kv_memory_bytes=kv_bytes,
        concurrency_mean=float(np.mean(running)) if running else 0.0,
        concurrency_peak=max(running, default=0),
        preemptions=preemptions,
        prefix_hit_rate=hits / queries if queries else 0.0,
    )
