"""The benchmark: workloads are what their options say, figures are what the engine did, the baseline is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagegraft.custom_ops.main import main
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.runtime.bench.command import BenchOptions, bench
from pagegraft.runtime.bench.static_baseline import StaticModel, find_model
from pagegraft.runtime.bench.workload import LengthRange, WorkloadOptions, make_workload
from pagegraft.runtime.config import EngineConfig
from pagegraft.runtime.engine.errors import ConfigurationError

SOURCES = Path(__file__).parents[1] / "data" / "zoo"


def test_lengths_are_log_uniform_and_seeded() -> None:
    options = WorkloadOptions(requests=4000, prompt_len=LengthRange(16, 512), output_len=LengthRange(7, 7), seed=3)
    workload = make_workload(options, 1000)
    lengths = [len(r.prompt) for r in workload]
    assert (min(lengths), max(lengths)) == (16, 512)
    # Half of a log-uniform draw lies below the geometric mean of its ends.
    assert np.mean([n < np.sqrt(16 * 513) for n in lengths]) == pytest.approx(0.5, abs=0.03)
    assert {r.output_length for r in workload} == {7}
    assert workload == make_workload(options, 1000)
    assert {t for r in workload[:50] for t in r.prompt} <= set(range(1000))


def test_arrivals_come_at_the_rate_and_prefixes_are_shared() -> None:
    options = WorkloadOptions(requests=3000, prompt_len=LengthRange(1, 2), shared_prefix=9, rate=50.0)
    workload = make_workload(options, 100)
    assert workload[-1].arrival == pytest.approx(60, rel=0.1)
    assert len({r.prompt[:9] for r in workload}) == 1
    assert {len(r.prompt) for r in workload} == {10, 11}


def test_a_trace_is_followed_and_a_broken_one_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": 0.5, "prompt_len": 3, "output_len": 2}, {"arrival": 0.1, "prompt_len": 4, "output_len": 1}]
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    workload = make_workload(WorkloadOptions(trace=trace), 10)
    assert [(r.arrival, len(r.prompt), r.output_length) for r in workload] == [(0.1, 4, 1), (0.5, 3, 2)]
    trace.write_text('{"arrival": 1}')
    with pytest.raises(ConfigurationError, match="is no trace"):
        make_workload(WorkloadOptions(trace=trace), 10)
    with pytest.raises(ConfigurationError, match="no range"):
        LengthRange.parse("9:3")


def padded_and_alone(name: str) -> tuple[list[list[int]], list[list[int]]]:
    model = StaticModel(find_model(SOURCES / name), num_threads=1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 256, n).tolist() for n in (3, 17, 9, 1)]
    lengths = [9, 2, 14, 5]
    batch = model.generate(prompts, lengths, ends=frozenset())
    alone = [model.generate([p], [n], ends=frozenset())[0] for p, n in zip(prompts, lengths, strict=True)]
    return batch, alone


@pytest.mark.parametrize("name", ["llama_gqa__opt", "gpt2__opt", "mistral__opt"])
def test_padding_and_leaving_early_do_not_change_the_baselines_tokens(name: str) -> None:
    batch, alone = padded_and_alone(name)
    assert batch == alone
    assert [len(tokens) for tokens in batch] == [9, 2, 14, 5]


def test_figures_and_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SOURCES / "llama_gqa__opt"
    convert(source, tmp_path / "paged", ConvertOptions(verify=False))
    output = tmp_path / "figures.json"
    workload = WorkloadOptions(
        requests=12, prompt_len=LengthRange(4, 40), output_len=LengthRange(4, 20), shared_prefix=32
    )
    options = BenchOptions(
        workload=workload,
        ignore_eos=True,
        baseline="static",
        baseline_batches=(4, 2),
        source=source,
        output=str(output),
    )
    config = EngineConfig(num_blocks=200, num_threads=1, max_num_seqs=6)
    figures: dict[str, Any] = bench(tmp_path / "paged", config, options)
    assert json.loads(output.read_text()) == json.loads(json.dumps(figures))
    requests = make_workload(workload, 256)
    assert figures["prompt_tokens"] == sum(len(r.prompt) for r in requests)
    assert figures["output_tokens"] == sum(r.output_length for r in requests)
    # Each request but the first finds the shared prefix; its last output token is never computed.
    computed = sum(len(r.prompt) + r.output_length - 1 for r in requests) - 11 * 32
    assert figures["computed_tokens"] == computed
    assert figures["prefix_hit_rate"] == pytest.approx(11 * 32 / figures["prompt_tokens"])
    assert figures["preemptions"] == 0
    assert figures["concurrency_peak"] == 6
    assert 0.5 < figures["kv_utilization_mean"] <= figures["kv_utilization_peak"] <= 1.0
    assert figures["throughput_tok_s"] == pytest.approx(figures["output_tokens"] / figures["seconds"])
    assert figures["speedup"] == pytest.approx(figures["throughput_tok_s"] / figures["baseline_tok_s"])
    assert figures["ttft_ms"]["p50"] > 0
    assert figures["itl_ms"]["p99"] >= figures["itl_ms"]["p50"]
    *arrival, by_length = figures["baseline_runs"]
    assert [(r["batch"], r["order"]) for r in arrival] == [(4, "arrival"), (2, "arrival")]
    best = max(arrival, key=lambda r: r["tok_s"])
    assert figures["baseline_tok_s"] == best["tok_s"]
    assert (by_length["batch"], by_length["order"]) == (best["batch"], "sorted by length")
    table = capsys.readouterr().out
    assert f"{figures['throughput_tok_s']:.1f} output tokens/s" in table
    assert "static batches of 2, arrival" in table


def test_standard_output_is_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(SOURCES / "llama_gqa__opt", tmp_path / "paged", ConvertOptions(verify=False))
    command = ["pagegraft", "bench", str(tmp_path / "paged"), "--json", "-", "--requests", "2", "--num-blocks", "64"]
    command += ["--prompt-len", "4:9", "--output-len", "3", "--ignore-eos", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["output_tokens"]) == (2, 6)
    keys = {"throughput_tok_s", "ttft_ms", "itl_ms", "kv_utilization_mean", "preemptions", "prefix_hit_rate"}
    assert keys <= set(figures)


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    convert(SOURCES / "llama_gqa__opt", tmp_path / "paged", ConvertOptions(verify=False))
    workload = WorkloadOptions(requests=1)
    config = EngineConfig(num_blocks=64)
    with pytest.raises(ConfigurationError, match="there is: static"):
        bench(tmp_path / "paged", config, BenchOptions(workload=workload, baseline="dynamic"))
    with pytest.raises(ConfigurationError, match="does not exist"):
        bench(tmp_path / "paged", config, BenchOptions(workload=workload, baseline="static", source=tmp_path / "no"))
