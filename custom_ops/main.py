"""The `pagegraft` command: collects the subcommands of the three packages and turns our errors into one line.

Imports of other packages wait until `main` watches over them: an interrupt ends the command without a traceback from
its first moment on.
"""

from __future__ import annotations

import os
import signal
import sys

from .errors import PagegraftError

TYPE_CHECKING = False  # as type checkers know it, without the time that importing it takes
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

    import typer

__all__ = ["main"]

_GROUP = "pagegraft.commands"
_INTERRUPTED = 128 + signal.SIGINT


def _application() -> typer.Typer:
    from importlib.metadata import entry_points

    import typer

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
        _loaded()()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except PagegraftError as error:
        _complain(str(error))
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # What no command foresaw: a full disk, a folder without permission, a file that vanished.
        place = f"{error.filename}: " if error.filename is not None else ""
        _complain(f"{place}{error.strerror or error}")


def _loaded() -> typer.Typer:
    """The application. An interrupt ends the process while it is imported: there is nothing to undo yet, and extension
    modules turn exceptions into others.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return _application()  # ignored in the background, or somebody else's
    signal.signal(signal.SIGINT, _end)
    try:
        return _application()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _complain(text: str) -> NoReturn:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"pagegraft: {text}", markup=False)
    sys.exit(1)
