"""Malformed feeds: an error or a right result, and nothing written beside caches and output."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pagegraft.custom_ops.conformance import fuzz as module
from pagegraft.custom_ops.conformance.fuzz import FuzzFindingError, fuzz


def _run(*arguments: str) -> str:
    """The fuzz target in a process of its own, so that a crash is a failure here and not the end of the test run."""
    command = [sys.executable, "-m", "pagegraft.custom_ops.conformance.fuzz", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_thousand_malformed_calls() -> None:
    assert "1000 calls" in _run("--count", "1000")


@pytest.mark.slow
def test_as_many_as_half_a_minute_allows() -> None:
    """`--count 1000000` without a time limit is the whole campaign."""
    assert "no finding" in _run("--count", "1000000", "--seed", "7", "--seconds", "30")


def test_calls_are_reproducible_and_both_kinds_occur() -> None:
    outcomes = fuzz(150, 3)
    assert outcomes == fuzz(150, 3)
    assert outcomes["error"] > 30
    assert outcomes["right"] > 10


def test_a_write_beside_a_cache_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module._run

    def spilling(target: module._Target, call: module.Call, output: np.ndarray) -> None:
        original(target, call, output)
        cache = call.feeds["key_cache"]
        outside = np.ndarray((1,), np.uint8, buffer=cache.base.base if cache.base.base is not None else cache.base)
        outside[0] = 0

    monkeypatch.setattr(module, "_run", spilling)
    with pytest.raises(FuzzFindingError, match="memory beside"):
        fuzz(50, 0)


def test_an_accepted_bad_call_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run", lambda target, call, output: None)
    with pytest.raises(FuzzFindingError, match="repeat it with --seed 0"):
        fuzz(50, 0)
