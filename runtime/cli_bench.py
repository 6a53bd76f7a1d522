"""`pagegraft bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .cli_options import Budget, Device, KvMemory, Model, Sequences, Speculate, Threads

if TYPE_CHECKING:
    from .bench.workload import WorkloadOptions

__all__ = ["bench"]

Requests = Annotated[int, typer.Option("--requests", help="How many requests.")]
PromptLength = Annotated[str, typer.Option("--prompt-len", help="Prompt tokens, A:B log-uniform.")]
OutputLength = Annotated[str, typer.Option("--output-len", help="Output tokens at most, A:B log-uniform.")]
SharedPrefix = Annotated[int, typer.Option("--shared-prefix", help="Tokens that all prompts begin with.")]
Rate = Annotated[Optional[float], typer.Option("--rate", help="Poisson arrivals a second.")]  # noqa: UP045
Trace = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--trace", help="JSON lines with arrival, prompt_len, output_len."),
]
WorkloadSeed = Annotated[int, typer.Option("--seed", help="Of lengths, tokens and arrivals.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Every output has its full length.")]
Baseline = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--baseline", help="static: padded static batches of the unconverted model, in the same run."),
]
BaselineBatch = Annotated[str, typer.Option("--baseline-batch", help="Batch sizes to try; the best one counts.")]
Source = Annotated[Optional[Path], typer.Option("--source", help="The unconverted model.")]  # noqa: UP045
Json = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--json", help="Write the figures to this file as JSON; - is stdout, instead of the table."),
]
Blocks = Annotated[Optional[int], typer.Option("--num-blocks", help="Instead of --kv-memory.")]  # noqa: UP045
BlockSize = Annotated[Optional[int], typer.Option("--block-size", help="Tokens a block.")]  # noqa: UP045
NoSharing = Annotated[bool, typer.Option("--no-prefix-caching", help="Share no blocks.")]


def bench(
    model: Model,
    requests: Requests = 100,
    prompt_len: PromptLength = "16:512",
    output_len: OutputLength = "16:256",
    shared_prefix: SharedPrefix = 0,
    rate: Rate = None,
    trace: Trace = None,
    seed: WorkloadSeed = 0,
    ignore_eos: IgnoreEos = False,
    baseline: Baseline = None,
    baseline_batch: BaselineBatch = "8,16",
    source: Source = None,
    output: Json = None,
    kv_memory: KvMemory = None,
    num_blocks: Blocks = None,
    block_size: BlockSize = None,
    threads: Threads = None,
    max_num_batched_tokens: Budget = 512,
    max_num_seqs: Sequences = None,
    device: Device = "cpu",
    speculative_tokens: Speculate = 0,
    no_prefix_caching: NoSharing = False,
) -> None:
    """Measures a model: throughput, latency, KV utilisation, and on request against static batches."""
    from .bench.command import BenchOptions, parse_batches
    from .bench.command import bench as run
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
    work = _workload(
        prompt_len, output_len, requests=requests, shared_prefix=shared_prefix, rate=rate, trace=trace, seed=seed
    )
    options = BenchOptions(
        workload=work,
        ignore_eos=ignore_eos,
        baseline=baseline,
        baseline_batches=parse_batches(baseline_batch),
        source=source,
        output=output,
    )
    run(model, config, options)


def _workload(prompt_len: str, output_len: str, **others: Any) -> WorkloadOptions:
    """Raises ConfigurationError."""
    from .bench.workload import LengthRange, WorkloadOptions

    return WorkloadOptions(prompt_len=LengthRange.parse(prompt_len), output_len=LengthRange.parse(output_len), **others)
