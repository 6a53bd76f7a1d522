"""The demo's live display: six answers that grow at once, and below them how fast and how full."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .prompts import DemoPrompt

__all__ = ["Answer", "Board"]

_LINES_EACH = 2


@dataclass
class Answer:
    """What has been generated for one prompt so far."""

    prompt: DemoPrompt
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    finish_reason: str | None = None


@dataclass
class Board:
    """All answers and the use of the block pool; renders itself for `rich.live.Live`.

    pool_use: owned blocks, and all there are. utilisation: live tokens over the slots of owned blocks.
    """

    prompts: Sequence[DemoPrompt]
    pool_use: Callable[[], tuple[int, int]]
    utilisation: Callable[[], float]
    clock: Callable[[], float] = time.perf_counter
    answers: list[Answer] = field(init=False)
    peak_blocks: int = field(init=False, default=0)
    utilisations: list[float] = field(init=False, default_factory=list)
    started: float = field(init=False)
    finished: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.answers = [Answer(prompt) for prompt in self.prompts]
        self.started = self.clock()

    @property
    def seconds(self) -> float:
        """Time since the first request was handed over, until the last answer was complete."""
        return (self.finished or self.clock()) - self.started

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all answers together, prompts not counted."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def observe(self) -> None:
        """Note the pool's use; call it after each update of an answer."""
        owned = self.pool_use()[0]
        self.peak_blocks = max(self.peak_blocks, owned)
        if owned:
            self.utilisations.append(self.utilisation())
        if self.finished is None and all(answer.finish_reason for answer in self.answers):
            self.finished = self.clock()

    def __rich_console__(self, console: Console, options: object) -> list[RenderableType]:
        """The growing answers (their last lines only, so that all six fit a small terminal) and a line of figures."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(ratio=1)
        width = max(console.width - 2 - max(len(prompt.title) for prompt in self.prompts), 20)
        for answer in self.answers:
            style = "dim" if answer.finish_reason else ""
            table.add_row(answer.prompt.title, Text(_tail(console, answer.text, width), style=style))
        return [Group(table, Text(self._figures(), style="green"))]

    def _figures(self) -> str:
        used, total = self.pool_use()
        running = sum(answer.finish_reason is None for answer in self.answers)
        speed = f"{self.num_tokens} tokens, {self.tokens_per_second:.0f}/s"
        return f"{running} running | {speed} | {used} of {total} blocks ({used / total:.0%})"

    def print_answers(self, console: Console) -> None:
        """Every prompt's question with its whole answer."""
        for answer in self.answers:
            question = Text(answer.prompt.content.strip().splitlines()[-1], style="bold")
            text = Text(answer.text.strip() + ("" if answer.finish_reason == "stop" else " …"))
            tokens = f"{answer.num_prompt_tokens} prompt tokens, {answer.num_cached_tokens} of them shared; "
            tokens += f"{len(answer.token_ids)} generated"
            console.print(Panel(Group(question, text), subtitle=tokens, subtitle_align="right"))


def _tail(console: Console, text: str, width: int) -> str:
    lines = Text(text.strip()).wrap(console, width)
    return "\n".join(line.plain.rstrip() for line in lines[-_LINES_EACH:])
