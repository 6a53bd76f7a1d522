"""The example backend, written from the contract's page alone: a third formulation, in another framework."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pagegraft.custom_ops.conformance import all_cases, load_backend, run_cases

torch = pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_backend"


def _red(step: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        backend = load_backend("torch_backend:TorchBackend")
        results = run_cases(backend, all_cases()[::step])
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("torch_backend", None)
    bad = [f"{r.id}: {r.detail}" for r in results if r.status == "failed"]
    return bad, sum(r.status == "passed" for r in results)


def test_a_sample_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, passed = _red(9, monkeypatch)
    assert not bad, "\n".join(bad)
    assert passed > 60


@pytest.mark.slow
def test_all_that_it_claims_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, passed = _red(1, monkeypatch)
    assert not bad, "\n".join(bad)
    assert passed > 640
