"""What `pagegraft conformance` does: run, export, import, mutants."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..errors import ContractError
from ..files import check_writable
from .backends import Backend, load_backend
from .cases import GROUPS, Case, all_cases
from .report import any_ran, print_summary, succeeded, write_json, write_junit
from .run import Result, read_xfails, run_cases

__all__ = ["Reports", "Selection", "export", "run", "run_mutants"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which cases: of these groups (all when empty) and with an id that fits one of the patterns (all when empty)."""

    groups: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def cases(self) -> list[Case]:
        """The selected cases. Raises ContractError for an unknown group or when nothing is selected."""
        for group in self.groups:
            if group not in GROUPS:
                raise ContractError(f"there is no group '{group}' of conformance cases; there are: {', '.join(GROUPS)}")
        chosen = [c for c in all_cases() if not self.groups or c.group in self.groups]
        chosen = [c for c in chosen if not self.patterns or any(fnmatchcase(c.id, p) for p in self.patterns)]
        if not chosen:
            raise ContractError(
                f"no conformance case fits {', '.join(self.patterns)}; ids look like core/decode_float32"
            )
        return chosen


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Files of a run: expected failures to read, reports to write."""

    xfails: Path | None = None
    json: Path | None = None
    junit: Path | None = None


def run(backend_name: str, selection: Selection, reports: Reports, *, imported: Path | None = None) -> bool:
    """Runs cases, or the vectors of a folder, and prints the summary. False when something failed or nothing ran."""
    for report in (reports.json, reports.junit):
        if report:
            check_writable(report, ContractError)
    backend = load_backend(backend_name)
    xfails = read_xfails(reports.xfails) if reports.xfails else ()
    if imported is not None:
        from .vectors import run_folder

        results = run_folder(backend, imported, xfails=xfails)
    else:
        results = _with_progress(backend, selection.cases(), xfails)
    print_summary(Console(), backend, results)
    if reports.json:
        write_json(reports.json, backend, results)
    if reports.junit:
        write_junit(reports.junit, backend, results)
    if not any_ran(results):
        Console().print("no case ran: all that is selected lies outside the backend's claims", style="red")
    return succeeded(results)


def export(folder: Path, selection: Selection) -> bool:
    """Writes the selected cases as portable vectors."""
    from .vectors import export_cases

    count, size = export_cases(folder, selection.cases())
    Console().print(f"wrote {count} vectors, {size / 1e6:.1f} MB, to {folder}", highlight=False)
    return True


def run_mutants(selection: Selection) -> bool:
    """Runs the suite on wrong kernels and prints which case caught each. False when one was not caught."""
    from .mutants import MUTANTS, hunt

    console, ok = Console(), True
    for mutant in MUTANTS:
        caught = hunt(mutant, selection.cases())
        ok &= caught is not None
        text = f"caught by {caught.id}: {caught.detail[:120]}" if caught else "NOT CAUGHT"
        console.print(f"{mutant.name}: {text}", markup=False, highlight=False, soft_wrap=True)
    return ok


def _with_progress(backend: Backend, cases: list[Case], xfails: tuple[str, ...]) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(backend.name, total=len(cases))

        def tell(result: Result) -> None:
            progress.update(task, advance=1, description=result.id[:40].ljust(40))

        return run_cases(backend, cases, xfails=xfails, on_result=tell)
