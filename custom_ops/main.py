"""The `pagegraft` command: collects the subcommands of the three packages and turns our errors into one line."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

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
    """Runs the command line. Exits with 1 and one line on stderr for an error of ours."""
    try:
        _application()()
    except PagegraftError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"pagegraft: {error}", markup=False)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
