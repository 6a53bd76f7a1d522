"""The suite on our own backends, and the suite's own rules: ids, selection, claims, expected failures, reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from pagegraft.custom_ops import doctor
from pagegraft.custom_ops.cli import register as register_commands
from pagegraft.custom_ops.conformance import (
    GROUPS,
    Capabilities,
    Result,
    all_cases,
    load_backend,
    run_case,
    run_cases,
)
from pagegraft.custom_ops.conformance.backends import FEATURES, ReferenceBackend, unclaimed
from pagegraft.custom_ops.conformance.command import Selection
from pagegraft.custom_ops.conformance.cpu_backend import CpuBackend
from pagegraft.custom_ops.conformance.report import succeeded, write_junit
from pagegraft.custom_ops.errors import ContractError
from typer.testing import CliRunner

CASES = {case.id: case for case in all_cases()}


def _application() -> typer.Typer:
    app = typer.Typer()
    register_commands(app)
    return app


def _quick(case: Any) -> bool:
    return case.kind != "far" and sum(case.setup.new) * max(case.setup.past + case.setup.new, default=0) < 3000


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend()


@pytest.mark.parametrize("group", GROUPS)
def test_cpu_passes(group: str, cpu: CpuBackend) -> None:
    """A group without device-sized variants and whatever takes long, which the slow tier adds."""
    cases = [c for c in all_cases() if c.group == group and not c.id.endswith("_f16_b16") and _quick(c)]
    cases = cases[::2] if group == "quantised" else cases
    bad = [f"{r.id}: {r.status} {r.detail}" for r in run_cases(cpu, cases) if r.status != "passed"]
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_everything_passes_and_is_claimed(name: str) -> None:
    cases = [c for c in all_cases() if name == "cpu" or not c.id.endswith("_f16_b16")]
    results = run_cases(load_backend(name), cases)
    bad = [f"{r.id}: {r.status} {r.detail}" for r in results if r.status != "passed"]
    assert not bad, "\n".join(bad)


def test_reference_passes_by_the_independent_oracle() -> None:
    results = run_cases(ReferenceBackend(), [c for c in all_cases() if _quick(c)][::11])
    bad = [f"{r.id}: {r.status} {r.detail}" for r in results if r.status != "passed"]
    assert not bad, "\n".join(bad)
    assert len(results) > 50


def test_every_part_of_the_contract_has_cases() -> None:
    """A backend that lacks any one feature, type or block size has cases that say so."""
    lacking = {f"feature {f}": Capabilities(features=frozenset(FEATURES) - {f}) for f in FEATURES}
    full = Capabilities()
    lacking |= {f"compute {t}": Capabilities(compute_dtypes=full.compute_dtypes - {t}) for t in full.compute_dtypes}
    lacking |= {f"cache {t}": Capabilities(cache_dtypes=full.cache_dtypes - {t}) for t in full.cache_dtypes}
    lacking |= {f"block {b}": Capabilities(block_sizes=full.block_sizes - {b}) for b in full.block_sizes}
    for case in all_cases():
        if case.kind == "compare" and _quick(case) and lacking:
            call = case.call()
            assert unclaimed(full, call, case.features) is None
            lacking = {n: c for n, c in lacking.items() if unclaimed(c, call, case.features) is None}
    assert not lacking


class _Claiming:
    """Claims what it is told to and fails whatever it is given."""

    name = "claiming"

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def run(self, feeds: dict[str, Any], attributes: dict[str, Any]) -> Mapping[str, Any]:
        raise RuntimeError("this backend runs nothing")


def test_a_backend_that_raises_fails_valid_and_negative_cases() -> None:
    backend = _Claiming(Capabilities())
    assert run_case(backend, CASES["core/decode_float32"]).status == "failed"
    assert run_case(backend, CASES["negative/block_id_n"]).status == "failed"  # no ValueError, names nothing


class _Masking(ReferenceBackend):
    """Treats forbidden ids and slots as -1, checks nothing else, as a device kernel may."""

    def capabilities(self) -> Capabilities:
        return Capabilities(bad_ids="masked", validates=False)

    def run(self, feeds: dict[str, Any], attributes: dict[str, Any]) -> Mapping[str, Any]:
        blocks, size = feeds["key_cache"].shape[:2]
        for name, limit in (("block_table", blocks), ("slot_mapping", blocks * size)):
            if name in feeds:
                feeds[name] = np.where((feeds[name] < -1) | (feeds[name] >= limit), -1, feeds[name])
        return super().run(feeds, attributes)


def test_a_masking_backend_is_judged_by_masked_results() -> None:
    results = run_cases(_Masking(), [c for c in all_cases() if c.group == "negative"])
    by_status = {s: [r.id for r in results if r.status == s] for s in ("passed", "not claimed", "failed")}
    assert not by_status["failed"]
    assert len(by_status["passed"]) == sum(c.bad_id for c in all_cases())
    assert len(by_status["not claimed"]) > 80


class _Wrong(ReferenceBackend):
    """One wrong value, given by output name and the value to put there."""

    def __init__(self, output: str, value: float) -> None:
        self._output, self._value = output, value

    def run(self, feeds: dict[str, Any], attributes: dict[str, Any]) -> Mapping[str, Any]:
        outputs = dict(super().run(feeds, attributes))
        outputs[self._output].reshape(-1)[-1] = self._value
        return outputs


@pytest.mark.parametrize("output", ["output", "key_cache_out", "value_cache_out"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.5])
def test_one_wrong_value_is_seen(output: str, value: float) -> None:
    """Non-finite values are compared like any other, in outputs and in slots that nothing addresses."""
    assert run_case(_Wrong(output, value), CASES["core/decode_float32"]).status == "failed"


class _Missing(ReferenceBackend):
    def run(self, feeds: dict[str, Any], attributes: dict[str, Any]) -> Mapping[str, Any]:
        outputs = dict(super().run(feeds, attributes))
        del outputs["value_cache_out"]
        return outputs


def test_a_missing_output_is_seen() -> None:
    result = run_case(_Missing(), CASES["core/decode_float32"])
    assert result.status == "failed"
    assert "value_cache_out" in result.detail


def test_ids_are_unique_and_grouped() -> None:
    ids = [case.id for case in all_cases()]
    assert len(set(ids)) == len(ids)
    assert {case.group for case in all_cases()} == set(GROUPS)
    assert all(case.id.startswith(f"{case.group}/") for case in all_cases())


def test_calls_are_reproducible() -> None:
    first, second = (CASES["masks/everything"].call() for _ in range(2))
    assert all(first.feeds[n].tobytes() == second.feeds[n].tobytes() for n in first.feeds)


@pytest.mark.parametrize("selection", [Selection(groups=("kernels",)), Selection(patterns=("core/none_such*",))])
def test_an_empty_selection_is_an_error(selection: Selection) -> None:
    with pytest.raises(ContractError, match="core"):
        selection.cases()


@pytest.mark.parametrize("name", ["cuda", "no.such.module:Thing", "json:JSONDecoder", "pagegraft:Nothing"])
def test_an_unknown_backend_is_one_clear_error(name: str) -> None:
    with pytest.raises(ContractError, match=name):
        load_backend(name)


def test_command_writes_reports_and_honours_xfails(tmp_path: Path) -> None:
    xfails = tmp_path / "xfails.txt"
    xfails.write_text("latent/no_such  # a comment\n", encoding="utf-8")
    arguments = ["conformance", "--backend", "reference", "--group", "latent", "--xfails", str(xfails)]
    arguments += ["--json", str(tmp_path / "r.json"), "--junit", str(tmp_path / "r.xml")]
    outcome = CliRunner().invoke(_application(), arguments)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads((tmp_path / "r.json").read_text())
    count = sum(c.group == "latent" for c in all_cases())
    assert report["backend"] == "reference"
    assert report["totals"] == {"passed": count}
    suites = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert len(suites.findall(".//testcase")) == count
    assert not suites.findall(".//failure")


def test_an_unexpected_pass_is_red(tmp_path: Path) -> None:
    xfails = tmp_path / "xfails.txt"
    xfails.write_text("latent/decode\n", encoding="utf-8")
    arguments = ["conformance", "--backend", "reference", "--group", "latent", "--xfails", str(xfails)]
    outcome = CliRunner().invoke(_application(), arguments)
    assert outcome.exit_code == 1
    assert "latent/decode" in outcome.output


def test_a_report_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    for option in ("--json", "--junit"):
        arguments = ["conformance", "--backend", "reference", "--case", "core/decode_float32"]
        outcome = CliRunner().invoke(_application(), [*arguments, option, str(tmp_path / "no" / "such")])
        assert isinstance(outcome.exception, ContractError)
        assert "cannot be written" in str(outcome.exception)


def test_error_texts_do_not_break_the_junit_report(tmp_path: Path) -> None:
    result = Result(id="core/x", group="core", status="failed", detail="\x1b[31mred\x00 & <odd> \ud800")
    write_junit(tmp_path / "r.xml", ReferenceBackend(), [result])
    assert "red" in str(ElementTree.parse(tmp_path / "r.xml").getroot().find(".//failure").attrib)  # type: ignore[union-attr]


def test_expected_failures_are_not_red() -> None:
    results = run_cases(_Wrong("output", np.nan), [CASES["core/decode_float32"]], xfails=("core/decode_*",))
    assert [r.status for r in results] == ["xfailed"]
    assert succeeded(results)


def test_doctor_reports_the_library() -> None:
    outcome = CliRunner().invoke(_application(), ["doctor"])
    assert outcome.exit_code == 0
    assert "libpagegraft_ops" in outcome.output
    assert "onnxruntime" in outcome.output


def test_doctor_reports_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "numpy>=1.26",
        "pytest>=8; extra == 'server'",
        'no-such-package>=1; extra == "server"',
        'none-of-it; sys_platform == "linux" and extra == "demo"',
        'also-not[x]<3; extra == "servers"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda _: declared)
    assert doctor.missing_packages("server") == ["no-such-package"]
    assert doctor.missing_packages("demo") == ["none-of-it"]
    assert doctor.missing_packages("guided") == []
    outcome = CliRunner().invoke(_application(), ["doctor"])
    assert "extra server needs no-such-package: pip install 'pagegraft[server]'\n" in outcome.output
    assert "extra guided installed\n" in outcome.output
