"""`pagegraft bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .cli_options import Budget, Device, KvMemory, Model, Sequences, Speculate, Threads

__all__ = ["bench"]


def bench(
    model: Model,
    requests: Annotated[int, typer.Option("--requests", help="How many requests.")] = 100,
    prompt_len: Annotated[str, typer.Option("--prompt-len", help="Prompt tokens, A:B log-uniform.")] = "16:512",
    output_len: Annotated[str, typer.Option("--output-len", help="Output tokens at most, A:B log-uniform.")] = "16:256",
    shared_prefix: Annotated[int, typer.Option("--shared-prefix", help="Tokens that all prompts begin with.")] = 0,
    rate: Annotated[Optional[float], typer.Option("--rate", help="Poisson arrivals a second.")] = None,  # noqa: UP045
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--trace", help="JSON lines with arrival, prompt_len, output_len."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths, tokens and arrivals.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every output has its full length.")] = False,
    baseline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--baseline", help="static: padded static batches of the unconverted model, in the same run."),
    ] = None,
    baseline_batch: Annotated[str, typer.Option("--baseline-batch", help="Batch sizes to try.")] = "8,16",
    source: Annotated[Optional[Path], typer.Option("--source", help="The unconverted model.")] = None,  # noqa: UP045
    output: Annotated[Optional[str], typer.Option("--json", help="Write JSON to this file; - is stdout.")] = None,  # noqa: UP045
    kv_memory: KvMemory = None,
    num_blocks: Annotated[Optional[int], typer.Option("--num-blocks", help="Instead of --kv-memory.")] = None,  # noqa: UP045
    block_size: Annotated[Optional[int], typer.Option("--block-size", help="Tokens a block.")] = None,  # noqa: UP045
    threads: Threads = None,
    max_num_batched_tokens: Budget = 512,
    max_num_seqs: Sequences = None,
    device: Device = "cpu",
    speculative_tokens: Speculate = 0,
    no_prefix_caching: Annotated[bool, typer.Option("--no-prefix-caching", help="Share no blocks.")] = False,
) -> None:
    """Measures a model: throughput, latency, KV utilisation, and on request against static batches."""
    from .bench.command import BenchOptions, parse_batches
    from .bench.command import bench as run
    from .bench.workload import LengthRange, WorkloadOptions
    from .config import EngineConfig

    config = EngineConfig(
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        block_size=block_size,
        num_threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        device=device,
        num_speculative_tokens=speculative_tokens,
        enable_prefix_caching=not no_prefix_caching,
    )
    workload = WorkloadOptions(
        requests=requests,
        prompt_len=LengthRange.parse(prompt_len),
        output_len=LengthRange.parse(output_len),
        shared_prefix=shared_prefix,
        rate=rate,
        trace=trace,
        seed=seed,
    )
    run(
        model,
        config,
        BenchOptions(
            workload=workload,
            ignore_eos=ignore_eos,
            baseline=baseline,
            baseline_batches=parse_batches(baseline_batch),
            source=source,
            output=output,
        ),
    )
