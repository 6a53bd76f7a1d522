"""Subcommands of `pagegraft` that belong to runtime. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .engine.errors import ConfigurationError

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling import SamplingParams

__all__ = ["register"]

Model = Annotated[Path, typer.Argument(help="Folder that `pagegraft convert` wrote.", show_default=False)]
KvMemory = Annotated[
    Optional[str],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option("--kv-memory", help="Memory for the caches, like 512MB or 2GiB. Default: 40 % of what is free."),
]
Threads = Annotated[Optional[int], typer.Option("--threads", help="Threads of the model. Default: one a core.")]  # noqa: UP045
Budget = Annotated[int, typer.Option("--max-num-batched-tokens", help="Tokens that one step computes at most.")]
Sequences = Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run at once at most.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Output tokens at most.")]
Temperature = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--temperature", help="0 is greedy. Default: what the model's generation_config.json says."),
]
TopP = Annotated[Optional[float], typer.Option("--top-p", help="Keep the likeliest tokens up to this mass.")]  # noqa: UP045
TopK = Annotated[Optional[int], typer.Option("--top-k", help="Keep so many of the likeliest tokens.")]  # noqa: UP045
Seed = Annotated[Optional[int], typer.Option("--seed", help="Makes sampled output reproducible.")]  # noqa: UP045
Debug = Annotated[bool, typer.Option("--debug", help="Check all accounting after each step.")]


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to the command line."""
    app.command()(generate)
    app.command()(chat)
    app.command()(serve)
    app.command()(bench)
    app.command()(demo)


def _load(model: Path, **settings: Any) -> LLM:
    from .llm import LLM

    return LLM(model, **settings)


def _params(llm: LLM, **given: Any) -> SamplingParams:
    """The model's defaults under what was given on the command line."""
    return llm.default_params(**{name: value for name, value in given.items() if value is not None})


def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="A prompt; may be given several times.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[Optional[list[str]], typer.Option("--stop", help="A string that ends the output.")] = None,  # noqa: UP045
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt instead of text.")] = False,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    max_num_batched_tokens: Budget = 512,
    max_num_seqs: Sequences = 128,
    debug: Debug = False,
) -> None:
    """Continues prompts, all of them together. One prompt streams; several are printed in order."""
    llm = _load(
        model,
        kv_memory=kv_memory,
        num_threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        debug=debug,
    )
    with llm:
        params = _params(
            llm,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
        if as_json:
            _print_json(llm, prompt, params)
        elif len(prompt) == 1:
            _stream_text(llm, prompt[0], params)
        else:
            for text, output in zip(prompt, llm.generate(prompt, params), strict=True):
                typer.echo(f"> {text}\n{output.outputs[0].text.strip()}\n")


def _stream_text(llm: LLM, prompt: Any, params: SamplingParams) -> str:
    """Prints an answer as it comes; returns it."""
    text = ""
    for output in llm.stream([prompt], params):
        new = output.outputs[0].text[len(text) :]
        text += new
        sys.stdout.write(new)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return text


def _print_json(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    import json

    for output in llm.generate(prompts, params):
        choice = output.outputs[0]
        typer.echo(
            json.dumps(
                {
                    "prompt": output.prompt,
                    "text": choice.text,
                    "token_ids": list(choice.token_ids),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "num_prompt_tokens": len(output.prompt_token_ids),
                    "num_cached_tokens": output.num_cached_tokens,
                },
                ensure_ascii=False,
            )
        )


def chat(
    model: Model,
    system: Annotated[Optional[str], typer.Option("--system", help="The system message.")] = None,  # noqa: UP045
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    chat_template: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--chat-template", help="A jinja2 file to use instead of the model's own template."),
    ] = None,
) -> None:
    """Talks with a model through its own chat template: a line is a turn, an empty line or Ctrl-D ends."""
    from .text import ChatTemplate

    with _load(model, kv_memory=kv_memory, num_threads=threads) as llm:
        template = llm.model.text.chat_template
        if chat_template is not None:
            template = ChatTemplate(chat_template.read_text(encoding="utf-8"), llm.model.text.special_tokens)
        params = _params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            ids = llm.tokenizer.encode(template.render(messages), add_special_tokens=False)
            answer = _stream_text(llm, {"prompt_token_ids": ids}, params)
            messages.append({"role": "assistant", "content": answer})


def _read_line() -> str:
    """A line of the user's, without its end; empty when there is no more."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def serve(
    model: Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8000,
    model_name: Annotated[Optional[str], typer.Option("--model-name", help="What clients call the model.")] = None,  # noqa: UP045
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--api-key", envvar="PAGEGRAFT_API_KEY", help="Wanted from clients as a bearer token."),
    ] = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    max_num_batched_tokens: Budget = 512,
    max_num_seqs: Sequences = 128,
    max_unfinished: Annotated[int, typer.Option("--max-unfinished", help="Further requests get status 429.")] = 1024,
    request_timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--request-timeout", help="Seconds after which a request is ended."),
    ] = None,
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", help="For running requests at the end.")] = 30.0,
    shared_memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--shared-memory", help="Name of a shared memory region for the caches."),
    ] = None,
) -> None:
    """Serves a model by OpenAI's HTTP interface, with metrics at /metrics and a chat page at /."""
    try:
        from .server.app import ServerOptions
        from .server.run import run_server
    except ImportError as error:
        raise ConfigurationError(
            f"the server needs {error.name}, which is not installed; run: pip install 'pagegraft[server]'"
        ) from error
    name = model_name or model.resolve().name
    options = ServerOptions(
        model_name=name, api_key=api_key, request_timeout=request_timeout, drain_seconds=drain_seconds
    )
    typer.echo(f"{name} at http://{host}:{port} (chat page), http://{host}:{port}/v1 (OpenAI), /metrics, /health")
    run_server(
        model,
        options,
        host=host,
        port=port,
        max_unfinished=max_unfinished,
        kv_memory=kv_memory,
        num_threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        shared_memory=shared_memory,
    )


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
    max_num_seqs: Sequences = 128,
    no_prefix_caching: Annotated[bool, typer.Option("--no-prefix-caching", help="Share no blocks.")] = False,
) -> None:
    """Measures a model: throughput, latency, KV utilisation, and on request against static batches."""
    from .bench.command import BenchOptions
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
    batches = tuple(int(part) for part in baseline_batch.split(","))
    run(
        model,
        config,
        BenchOptions(
            workload=workload,
            ignore_eos=ignore_eos,
            baseline=baseline,
            baseline_batches=batches,
            source=source,
            output=output,
        ),
    )


def demo(
    where: Annotated[bool, typer.Option("--where", help="Print the converted model's folder and end.")] = False,
) -> None:
    """Converts SmolLM2-135M-Instruct from a package's weights and answers six chat prompts at once."""
    from .demo.demo import run_demo, where as folder  # noqa: I001

    if where:
        typer.echo(folder())
    else:
        run_demo()
