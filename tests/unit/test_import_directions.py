"""Who may import whom: graphpass and runtime never each other, the server only the async engine and below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("graphpass", "custom_ops", "runtime")
#: For each place, what of pagegraft it may import.
ALLOWED = {
    "graphpass": ("pagegraft.graphpass", "pagegraft.custom_ops"),
    "custom_ops": ("pagegraft.custom_ops",),
    "runtime": ("pagegraft.runtime", "pagegraft.custom_ops"),
}


def _modules(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything of pagegraft that a module imports, also inside functions."""
    parts = ["pagegraft", *path.relative_to(ROOT).with_suffix("").parts]
    package = parts if path.name == "__init__.py" else parts[:-1]
    package = package[:-1] if path.name == "__init__.py" else package
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "pagegraft")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "pagegraft":
                yield from ((node.lineno, f"{module}.{a.name}") for a in node.names)


def _within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    modules = _modules(package)
    assert modules
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules
        for line, name in _imports(path)
        if name != "pagegraft.custom_ops" and not _within(name, ALLOWED[package])
    ]
    assert not wrong, "\n".join(wrong)


def _file_of(name: str) -> Path | None:
    """The module that a dotted name lies in: itself, or what holds it."""
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:end])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


def _reached_from(path: Path) -> set[Path]:
    """The module and everything of pagegraft that it imports, directly or not."""
    reached, todo = set(), [path]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += [found for _, name in _imports(module) if (found := _file_of(name))]
    return reached


def test_the_server_imports_the_async_engine_and_below() -> None:
    """Whatever the server imports from outside itself is the async engine or something that the engine rests on."""
    server = ROOT / "runtime" / "server"
    below = _reached_from(ROOT / "runtime" / "async_engine.py")
    modules = sorted(server.rglob("*.py"))
    assert modules
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules
        for line, name in _imports(path)
        if (found := _file_of(name)) and server not in found.parents and found not in below
    ]
    assert not wrong, "\n".join(wrong)
    assert not [path for path in below if server in path.parents], "the async engine imports the server"


def test_the_check_itself_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "runtime" / "engine" / "x.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import pagegraft.graphpass.cli\n"
        "from pagegraft import graphpass\n"
        "from ...graphpass import convert\n"
        "def f():\n    from ..model import session\n"
        "import numpy\n"
    )
    assert [name for _, name in _imports(module)] == [
        "pagegraft.graphpass.cli",
        "pagegraft.graphpass",
        "pagegraft.graphpass.convert",
        "pagegraft.runtime.model.session",
    ]
