"""How long work reports what it is doing, and a display of it on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["ProgressReport", "no_progress", "terminal_progress"]


class ProgressReport(Protocol):
    """Called again and again: `stage` is what is being done, `done` of `total` bytes of it are."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nowhere."""


@contextmanager
def terminal_progress(console: Console) -> Iterator[ProgressReport]:
    """One bar for each stage; off a terminal, one line for each stage that is finished."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    display = Progress(*columns, console=console)
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = display.add_task(stage, total=total)
            display.start()  # not before: nothing to do shows nothing
        display.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            display.stop()
