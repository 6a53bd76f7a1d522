"""What the package's metadata tells pip."""

from __future__ import annotations

from importlib.metadata import metadata, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def test_an_older_python_is_named_by_every_pip() -> None:
    """pip 23 asks for the dependencies before it looks at the Python that the package wants, and names the first that
    it cannot have: onnxruntime has no such version for older Pythons.
    """
    pythons = SpecifierSet(metadata("pagegraft")["Requires-Python"])
    assert "3.10" not in pythons
    (onnxruntime,) = [r for r in map(Requirement, requires("pagegraft") or ()) if r.name == "onnxruntime"]
    for python in ("3.9", "3.10", "3.11", "3.14"):
        wanted = onnxruntime.marker is None or onnxruntime.marker.evaluate({"python_version": python})
        assert wanted == (python in pythons)
