"""The suite's own test: every wrong kernel is turned red, and the unchanged reference is not."""

from __future__ import annotations

import pytest
from pagegraft.custom_ops.conformance import all_cases
from pagegraft.custom_ops.conformance.mutants import MUTANTS, Mutant, MutantBackend, hunt
from pagegraft.custom_ops.conformance.run import run_cases
from pagegraft.custom_ops.errors import ContractError


def test_there_are_many_mutants() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 15


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_turned_red(mutant: Mutant, record_property: pytest.FixtureRequest) -> None:
    caught = hunt(mutant, [c for c in all_cases() if c.group == mutant.group])
    assert caught is not None, f"no case of group {mutant.group} caught it"
    record_property("caught by", f"{caught.id}: {caught.detail}")  # type: ignore[operator]
    print(f"{mutant.name}: caught by {caught.id}: {caught.detail}")


def test_an_unchanged_reference_is_not_red() -> None:
    unchanged = MutantBackend(Mutant(name="unchanged", edits=(), group="core"))
    cases = [c for c in all_cases() if c.group in ("masks", "layout") and c.kind == "compare"]
    assert {r.status for r in run_cases(unchanged, cases)} == {"passed"}


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(ContractError, match="once"):
        MutantBackend(Mutant(name="stale", edits=(("no such text", "x"),), group="core"))
