"""The demo from end to end: fetch and export a real model, convert it, answer six chats at once, say how it went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ...custom_ops.errors import ManifestError
from ...custom_ops.manifest import Manifest
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .board import Board
from .cache import default_cache_dir
from .conversion import conversion_summary, convert_once
from .errors import DemoError
from .export import SOURCE_NAME, export_smollm2
from .progress import terminal_progress
from .prompts import DEMO_PROMPTS, DemoPrompt

__all__ = ["answer", "prepare", "run_demo", "where"]

#: Small on purpose: the six chats fill most of it, so that its use can be watched.
KV_MEMORY = "64MiB"


def where(cache_dir: Path | None = None) -> Path:
    """Folder of the demo's converted model.

    Raises:
        DemoError: there is none yet, or it is not intact.
    """
    folder = _converted(cache_dir or default_cache_dir())
    if not folder.is_dir():
        raise DemoError(f"the demo's model is not there yet ({folder}): run pagegraft demo")
    try:
        Manifest.load(folder)
    except ManifestError as error:
        raise DemoError(f"the demo's model is not intact ({error}): run pagegraft demo") from error
    return folder


def run_demo(
    cache_dir: Path | None = None,
    *,
    console: Console | None = None,
    prompts: Sequence[DemoPrompt] = DEMO_PROMPTS,
    num_threads: int | None = None,
) -> Board:
    """Run the whole demo and print it; the board that is returned holds the answers and figures.

    Raises:
        DemoError: the model cannot be fetched, exported or converted.
    """
    console = console or Console()
    began = time.perf_counter()
    folder = prepare(cache_dir or default_cache_dir(), console)
    with LLM(folder, kv_memory=KV_MEMORY, max_num_seqs=len(prompts), num_threads=num_threads) as llm:
        ready = time.perf_counter()
        board = answer(llm, prompts, console)
        board.print_answers(console)
        _print_figures(llm, board, console)
    times = f"{ready - began:.0f} s to the loaded model, {board.seconds:.1f} s for the answers"
    console.print(f"{times}\nTalk to it:  pagegraft chat {folder}", soft_wrap=True, highlight=False)
    return board


def prepare(cache_dir: Path, console: Console) -> Path:
    """The converted model's folder, made if need be; prints what the pass did.

    Raises:
        DemoError: the model cannot be fetched, exported or converted.
    """
    with terminal_progress(console) as progress:
        source = export_smollm2(cache_dir, progress=progress)
    target = _converted(cache_dir)
    if not convert_once(source, target, console):
        console.print(f"converted before: {target}", soft_wrap=True, highlight=False)
    table = Table(title="What the pass did", show_header=False, title_justify="left")
    for heading, text in conversion_summary(target):
        table.add_row(heading, text)
    console.print(table)
    return target


def answer(llm: LLM, prompts: Sequence[DemoPrompt], console: Console) -> Board:
    """Answer all prompts together, greedily, with a live display of the growing answers."""
    pool = llm.engine.scheduler.cache.pools[0]
    board = Board(prompts, pool_use=lambda: (pool.num_owned, pool.num_blocks), utilisation=llm.engine.kv_utilisation)
    requests = [llm.chat_prompt(prompt.messages) for prompt in prompts]
    index_of = {tuple(request["prompt_token_ids"]): index for index, request in enumerate(requests)}
    params = [SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens) for prompt in prompts]
    with Live(board, console=console, refresh_per_second=8, transient=True):
        for output in llm.stream(requests, params):
            _record(board, index_of[tuple(output.prompt_token_ids)], output)
    return board


def _record(board: Board, index: int, output: RequestOutput) -> None:
    grown, choice = board.answers[index], output.outputs[0]
    grown.num_prompt_tokens = len(output.prompt_token_ids)
    grown.num_cached_tokens = output.num_cached_tokens
    grown.token_ids, grown.text, grown.finish_reason = choice.token_ids, choice.text, choice.finish_reason
    board.observe()


def _print_figures(llm: LLM, board: Board, console: Console) -> None:
    pool, size = llm.engine.scheduler.cache.pools[0], llm.model.block_size
    held = board.peak_blocks * size
    padded = len(board.answers) * max(a.num_prompt_tokens + a.prompt.max_tokens for a in board.answers)
    shared = sum(answer.num_cached_tokens for answer in board.answers)
    table = Table(title="How it went", show_header=False, title_justify="left")
    speed = f"{board.num_tokens} tokens in {board.seconds:.1f} s: {board.tokens_per_second:.0f} tokens/s"
    table.add_row("speed", speed + ", prompts included in the time")
    mean = sum(board.utilisations) / max(len(board.utilisations), 1)
    table.add_row("KV utilisation", f"{mean:.0%} of the slots of the blocks in use hold a live token, on average")
    use = f"{board.peak_blocks} of {pool.num_blocks} blocks at the peak"
    table.add_row("KV pool", f"{use}, {size} tokens a block, {llm.model.kv_bytes / 2**20:.0f} MiB in all")
    table.add_row("against padding", f"{held} token slots held; one padded batch of these six would hold {padded}")
    table.add_row("shared prefix", f"{shared} prompt tokens were not computed again")
    console.print(table)


def _converted(cache_dir: Path) -> Path:
    return cache_dir / f"{SOURCE_NAME}-paged"
