"""Prometheus metrics under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..async_engine import AsyncLLM
from ..outputs import RequestOutput

__all__ = ["RequestClock", "ServerMetrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _EngineCollector(Collector):
    """Reads the engine when metrics are asked for."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters of this moment."""
        stats = self._llm.stats()
        gauges = {
            "vllm:num_requests_running": ("Sequences that run.", stats.num_running),
            "vllm:num_requests_waiting": ("Sequences that wait.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Owned blocks over all blocks, 1 is full.", stats.kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        counters = {
            "vllm:num_preemptions": ("Preemptions.", stats.counters.preemptions),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the cache.", stats.counters.prefix_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the cache.", stats.counters.prefix_hits),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._label, value)
            yield counter


class ServerMetrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(llm, model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return metric.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self._registry).labels(model_name)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to first token.", _SECONDS)
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", "Between a stream's outputs.", _SECONDS)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", _SECONDS)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self.output_length = histogram("vllm:request_generation_tokens", "Output tokens a request.", _TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self.output_tokens = counter("vllm:generation_tokens", "Output tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Finished requests by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )

    def success(self, reason: str) -> Counter:
        """The counter of requests that ended for a reason."""
        return self._success.labels(self._name, reason)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class RequestClock:
    """Observes the outputs of one request."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: float | None = None
        self._tokens = 0

    def see(self, output: RequestOutput) -> None:
        """Takes the request's output so far."""
        metrics, now = self._metrics, time.monotonic()
        times = output.metrics
        tokens = sum(len(choice.token_ids) for choice in output.outputs)
        if self._last is None and times.first_token is not None:
            metrics.first_token.observe(times.first_token - times.arrival)
        elif self._last is not None and tokens > self._tokens:
            metrics.between_tokens.observe(now - self._last)
        metrics.output_tokens.inc(max(0, tokens - self._tokens))
        self._last, self._tokens = now, max(tokens, self._tokens)
        if output.finished:
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            metrics.prompt_length.observe(len(output.prompt_token_ids))
            metrics.output_length.observe(tokens)
            if times.finished is not None:
                metrics.whole.observe(times.finished - times.arrival)
            for choice in output.outputs:
                metrics.success(choice.finish_reason or "stop").inc()
