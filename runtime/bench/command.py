"""Puts a benchmark run together and reports it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...custom_ops.files import check_writable
from ..config import EngineConfig
from ..engine.errors import ConfigurationError
from ..loading import LoadedModel, load_engine
from ..model.memory import format_bytes
from .measure import BenchResult, Percentiles, run_workload
from .static_baseline import BaselineResult, StaticModel, best_baseline, find_model
from .workload import LengthRange, WorkloadOptions, make_workload

__all__ = ["BenchOptions", "bench", "parse_batches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to run. baseline: None or "static", which needs `source`, the unconverted model.

    output: a file for the JSON beside the table, or "-" for standard output instead of it.
    """

    workload: WorkloadOptions
    ignore_eos: bool = False
    baseline: str | None = None
    baseline_batches: tuple[int, ...] = (8, 16)
    source: Path | None = None
    output: str | None = None


def bench(path: Path, config: EngineConfig, options: BenchOptions) -> dict[str, Any]:
    """Runs the workload, and the baseline when asked; prints or writes the figures and returns them.

    Raises ConfigurationError for options that cannot work.
    """
    _check(options)
    console = Console(stderr=options.output == "-")
    model = load_engine(path, config)
    workload = make_workload(options.workload, model.manifest.vocab_size)
    static = None
    if options.baseline and options.source is not None:
        static = StaticModel(find_model(options.source), num_threads=config.num_threads)
    _warm_up(model)
    result = run_workload(model.engine, workload, ignore_eos=options.ignore_eos, kv_bytes=model.kv_bytes)
    figures = result.to_dict()
    runs: list[BaselineResult] = []
    if static is not None:
        model.engine.close()
        ends = frozenset() if options.ignore_eos else model.text.eos_token_ids
        static.generate([workload[0].prompt[:8]], [2], ends=ends)
        runs = best_baseline(static, workload, options.baseline_batches, ends=ends)
        best = max((r for r in runs if r.order == "arrival"), key=lambda r: r.tok_s)
        figures["baseline_tok_s"] = best.tok_s
        figures["speedup"] = result.throughput_tok_s / best.tok_s
        figures["baseline_runs"] = [
            {"batch": r.batch, "order": r.order, "tok_s": r.tok_s, "seconds": r.seconds} for r in runs
        ]
    _report(console, result, runs, figures, options)
    return figures


def parse_batches(text: str) -> tuple[int, ...]:
    """Batch sizes written like "8,16". Raises ConfigurationError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"'{text}' are no batch sizes; write them like 8,16") from None


def _warm_up(model: LoadedModel) -> None:
    """Two steps, so that nothing first-time is measured."""
    workload = make_workload(
        WorkloadOptions(requests=1, prompt_len=LengthRange(8, 8), output_len=LengthRange(2, 2), seed=1),
        model.manifest.vocab_size,
    )
    run_workload(model.engine, workload, ignore_eos=True, kv_bytes=0)


def _check(options: BenchOptions) -> None:
    """Raises ConfigurationError for what would fail only after the measurement, or not at all."""
    if options.baseline not in (None, "static"):
        raise ConfigurationError(f"--baseline {options.baseline} is unknown; there is: static")
    if options.baseline and options.source is None:
        raise ConfigurationError("--baseline static runs the unconverted model; give it with --source")
    if options.source is not None and not options.source.exists():
        raise ConfigurationError(f"the unconverted model {options.source} does not exist; give it with --source")
    if not options.baseline_batches or min(options.baseline_batches) < 1:
        raise ConfigurationError("a batch of the baseline has at least 1 request; give sizes like 8,16")
    if options.output not in (None, "-"):
        check_writable(Path(options.output), ConfigurationError)


def _report(
    console: Console, result: BenchResult, runs: list[BaselineResult], figures: dict[str, Any], options: BenchOptions
) -> None:
    if options.output is not None:
        text = json.dumps(figures, indent=2)
        if options.output == "-":
            sys.stdout.write(text + "\n")
            return
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _rows(result):
        table.add_row(name, value)
    for run in runs:
        name = f"static batches of {run.batch}, {run.order}"
        table.add_row(name, f"{run.tok_s:.1f} output tokens/s ({result.throughput_tok_s / run.tok_s:.2f}x)")
    console.print(table)


def _rows(r: BenchResult) -> list[tuple[str, str]]:
    return [
        ("requests", f"{r.requests} in {r.seconds:.2f} s, {r.steps} steps"),
        ("tokens", f"{r.prompt_tokens} prompt, {r.output_tokens} output, {r.computed_tokens} computed"),
        ("throughput", f"{r.throughput_tok_s:.1f} output tokens/s ({r.total_tok_s:.1f} with prompts)"),
        ("time to first token", _milliseconds(r.ttft_ms)),
        ("between tokens", _milliseconds(r.itl_ms)),
        ("KV utilisation", f"{r.kv_utilization_mean:.1%} mean, {r.kv_utilization_peak:.1%} peak"),
        ("KV memory", format_bytes(r.kv_memory_bytes)),
        ("running sequences", f"{r.concurrency_mean:.1f} mean, {r.concurrency_peak} peak"),
        ("preemptions", str(r.preemptions)),
        ("prefix hit rate", f"{r.prefix_hit_rate:.1%}"),
    ]


def _milliseconds(p: Percentiles) -> str:
    if p.mean is None:
        return "-"
    return f"{p.mean:.1f} ms mean, {p.p50:.1f} p50, {p.p90:.1f} p90, {p.p99:.1f} p99"
