"""Subcommands of `pagegraft` that belong to runtime. Heavy imports wait until a command runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .cli_form import JsonSchema, Regex, read_form
from .cli_options import (
    Budget,
    ChatTemplateFile,
    Debug,
    Device,
    KvMemory,
    MaxTokens,
    Model,
    Seed,
    Sequences,
    Speculate,
    Temperature,
    Threads,
    TopK,
    TopP,
    read_template,
)
from .engine.errors import StepError

if TYPE_CHECKING:
    from .llm import LLM
    from .outputs import RequestOutput
    from .sampling import SamplingParams

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to the command line."""
    from .cli_bench import bench
    from .cli_serve import serve

    for command in (generate, chat, serve, bench, demo):
        app.command()(command)


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
    json_schema: JsonSchema = None,
    regex: Regex = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt instead of text.")] = False,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    max_num_batched_tokens: Budget = 512,
    max_num_seqs: Sequences = None,
    device: Device = "cpu",
    speculative_tokens: Speculate = 0,
    debug: Debug = False,
) -> None:
    """Continues prompts, all of them together. One prompt streams; several are printed in order."""
    form = read_form(json_schema, regex)
    llm = _load(
        model,
        kv_memory=kv_memory,
        num_threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        device=device,
        num_speculative_tokens=speculative_tokens,
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
            structured_outputs=form,
        )
        if as_json:
            _print_json(llm, prompt, params)
        elif len(prompt) == 1:
            _stream_text(llm, prompt[0], params)
        else:
            outputs = llm.generate(prompt, params)
            for text, output in zip(prompt, outputs, strict=True):
                typer.echo(f"> {text}\n{output.outputs[0].text.strip()}\n")
            _check_finished(outputs)


def _stream_text(llm: LLM, prompt: Any, params: SamplingParams, *, stopped: Callable[[], bool] = lambda: False) -> str:
    """Prints an answer as it comes, until `stopped`; returns it. Raises StepError when the model fails on it."""
    text = ""
    output = None
    for output in llm.stream([prompt], params):
        new = output.outputs[0].text[len(text) :]
        text += new
        sys.stdout.write(new)
        sys.stdout.flush()
        if stopped():
            break
    sys.stdout.write("\n")
    sys.stdout.flush()
    _check_finished([] if output is None else [output])
    return text


def _check_finished(outputs: Sequence[RequestOutput]) -> None:
    """Raises StepError when the model failed on a request, after what there is of the outputs was printed."""
    errors = [choice.error or "" for output in outputs for choice in output.outputs if choice.finish_reason == "error"]
    if errors:
        raise StepError(f"{len(errors)} of {len(outputs)} requests failed: {errors[0]}")


def _print_json(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    import json

    outputs = llm.generate(prompts, params)
    for output in outputs:
        choice = output.outputs[0]
        typer.echo(
            json.dumps(
                {
                    "prompt": output.prompt,
                    "text": choice.text,
                    "token_ids": list(choice.token_ids),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "error": choice.error,
                    "num_prompt_tokens": len(output.prompt_token_ids),
                    "num_cached_tokens": output.num_cached_tokens,
                },
                ensure_ascii=False,
            )
        )
    _check_finished(outputs)


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
    device: Device = "cpu",
    speculative_tokens: Speculate = 0,
    chat_template: ChatTemplateFile = None,
) -> None:
    """Talks with a model through its own chat template: a line is a turn, an empty line or Ctrl-D ends.

    Ctrl-C ends an answer, and at the prompt or a second time the chat.
    """
    with _load(
        model,
        kv_memory=kv_memory,
        num_threads=threads,
        device=device,
        num_speculative_tokens=speculative_tokens,
        chat_template=read_template(chat_template),
    ) as llm:
        _ = llm.model.text.chat_template  # refused before the first turn where there is none
        params = _params(llm, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            prompt = llm.chat_prompt(messages)
            with _first_interrupt() as interrupted:
                answer = _stream_text(llm, prompt, params, stopped=interrupted)
            messages.append({"role": "assistant", "content": answer})


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT has come, for the first time within the block: the engine is not torn out of a step by it.

    From the second time on it is a KeyboardInterrupt.
    """
    came = Event()

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        came.set()

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, or somebody else's
        signal.signal(signal.SIGINT, first)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str:
    """A line of the user's, without its end; empty when there is no more."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def demo(
    where: Annotated[bool, typer.Option("--where", help="Print the converted model's folder and end.")] = False,
) -> None:
    """Converts SmolLM2-135M-Instruct from a package's weights and answers six chat prompts at once."""
    from .demo.demo import run_demo, where as folder  # noqa: I001

    if where:
        typer.echo(folder())
    else:
        run_demo()
