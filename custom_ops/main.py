"""The `pagegraft` command: collects the subcommands of the three packages and turns our errors into one line."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import NoReturn

import typer
from rich.console import Console

from .errors import PagegraftError

__all__ = ["main"]

_GROUP = "pagegraft.commands"


def _application() -> typer.Typer:
    app = typer.Typer(
        name="pagegraft",
        help="Graft a paged KV cache onto an exported ONNX language model and serve it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for entry in sorted(entry_points(group=_GROUP), key=lambda e: e.name):
        entry.load()(app)
    return app


def main() -> None:
    """Runs the command line. Exits with 1 and one line on stderr for an error of ours or of the operating system."""
    try:
        _application()()
    except PagegraftError as error:
        _complain(str(error))
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # What no command foresaw: a full disk, a folder without permission, a file that vanished.
        place = f"{error.filename}: " if error.filename is not None else ""
        _complain(f"{place}{error.strerror or error}")


def _complain(text: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"pagegraft: {text}", markup=False)
    sys.exit(1)
