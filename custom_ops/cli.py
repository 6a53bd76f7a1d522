"""What belongs to custom_ops in the command line: `--version`, `conformance` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds `--version` and this package's subcommands to the command line."""
    app.callback()(options)
    app.command("conformance")(conformance)
    app.command("doctor")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"pagegraft {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of the command itself."""


def conformance(
    backend: Annotated[str, typer.Option(help="cpu, reference, ascend-emulator, or package.module:Class.")] = "cpu",
    group: Annotated[list[str] | None, typer.Option(help="Only this group of cases; may be repeated.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases whose id fits this glob pattern.")] = None,
    xfails: Annotated[Path | None, typer.Option(help="File with ids of cases that are expected to fail.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write a JSON report here.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit XML report here.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write portable test vectors to this new folder.")] = None,
    import_: Annotated[Path | None, typer.Option("--import", help="Run the vectors of this folder.")] = None,
    mutants: Annotated[bool, typer.Option("--mutants", help="Check the suite itself with wrong kernels.")] = False,
) -> None:
    """Runs the PagedAttention conformance suite on a backend, or writes its cases as portable vectors."""
    from .conformance import command

    selection = command.Selection(groups=tuple(group or ()), patterns=tuple(case or ()))
    if mutants:
        ok = command.run_mutants(selection)
    elif export is not None:
        ok = command.export(export, selection)
    else:
        reports = command.Reports(xfails=xfails, json=json, junit=junit)
        ok = command.run(backend, selection, reports, imported=import_)
    if not ok:
        raise typer.Exit(1)


def doctor() -> None:
    """Reports versions, extras, the compiled library and the instruction set it chose on this machine."""
    from .doctor import report

    if not report():
        raise typer.Exit(1)
