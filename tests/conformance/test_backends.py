"""What is said to someone whose backend is named, made, or claimed wrongly, or returns what it must not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from pagegraft.custom_ops.cli import register as register_commands
from pagegraft.custom_ops.conformance import Capabilities, all_cases, load_backend, run_case, run_cases
from pagegraft.custom_ops.conformance.backends import ReferenceBackend
from pagegraft.custom_ops.conformance.cpu_backend import CpuBackend
from pagegraft.custom_ops.conformance.report import succeeded
from pagegraft.custom_ops.errors import ContractError
from typer.testing import CliRunner

CASES = {case.id: case for case in all_cases()}

_MODULE = """
from pagegraft.custom_ops.conformance import Capabilities
from pagegraft.custom_ops.conformance.backends import ReferenceBackend

class Nothing(ReferenceBackend):
    def capabilities(self):
        return Capabilities(block_sizes=())

class NoRun:
    name = "norun"
    def capabilities(self):
        return Capabilities()

class Argument(ReferenceBackend):
    def __init__(self, device):
        pass

class Misspelt(ReferenceBackend):
    def capabilities(self):
        return Capabilities(blocksizes={16})

class NoClaims(ReferenceBackend):
    def capabilities(self):
        return None
"""


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of backends that can be imported."""
    name = "newcomers_backends"
    (tmp_path / f"{name}.py").write_text(_MODULE, encoding="utf-8")
    (tmp_path / "lacks_a_package.py").write_text("import no_such_package_of_anyone\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (name, "lacks_a_package"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


@pytest.mark.parametrize("name", ["./mine.py:Mine", "mine.py:Mine", "folder/mine:Mine", "json", "json:", ":Mine"])
def test_what_is_no_module_and_class_is_told_the_form(name: str) -> None:
    with pytest.raises(ContractError, match=r"give package\.module:Class") as caught:
        load_backend(name)
    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_found_is_told_of_the_path() -> None:
    with pytest.raises(ContractError, match=r"PYTHONPATH=\."):
        load_backend("no_such_module_here:Mine")


def test_a_module_that_lacks_another_is_not_told_of_the_path(newcomer: str) -> None:
    with pytest.raises(ContractError, match="no_such_package_of_anyone") as caught:
        load_backend("lacks_a_package:Mine")
    assert "PYTHONPATH" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NoRun", "has no run"),
        ("Argument", "without arguments"),
        ("Misspelt", "blocksizes"),
        ("NoClaims", r"must return Capabilities"),
    ],
)
def test_a_class_that_is_no_backend_is_told_why(newcomer: str, name: str, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        load_backend(f"{newcomer}:{name}")


def test_every_missing_member_is_named() -> None:
    with pytest.raises(ContractError, match=r"has no name and no capabilities and no run"):
        load_backend("json:JSONDecoder")


def test_a_run_without_a_case_is_red(newcomer: str) -> None:
    app = typer.Typer()
    register_commands(app)
    outcome = CliRunner().invoke(app, ["conformance", "--backend", f"{newcomer}:Nothing", "--case", "core/decode_*"])
    assert outcome.exit_code == 1
    assert "no case ran" in outcome.output


@pytest.mark.parametrize(
    ("claim", "unknown"),
    [
        ("compute_dtypes", {"float64"}),
        ("cache_dtypes", {"uint8"}),
        ("block_sizes", {24}),
        ("block_sizes", 16),
        ("features", {"flash"}),
        ("features", "latent"),
        ("bad_ids", "ignored"),
        ("head_size_multiple", 0),
    ],
)
def test_a_claim_that_the_contract_lacks_is_refused(claim: str, unknown: Any) -> None:
    with pytest.raises(ContractError, match=claim):
        Capabilities(**{claim: unknown})


@pytest.mark.parametrize("kind", [set, list, tuple, frozenset])
def test_claims_may_be_any_collection(kind: Any) -> None:
    claims = Capabilities(
        compute_dtypes=kind(["float16"]), cache_dtypes=kind(["int8"]), block_sizes=kind([16]), features=kind(["window"])
    )
    assert claims.features == frozenset({"window"})
    for name in ("compute_dtypes", "cache_dtypes", "block_sizes", "features"):
        assert isinstance(getattr(claims, name), frozenset)


class _Returning(ReferenceBackend):
    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def run(self, feeds: dict[str, Any], attributes: dict[str, Any]) -> Mapping[str, Any]:
        return self._outputs  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (None, "run() returned None"),
        ((1, 2), "run() returned a tuple"),
        ({"key_cache_out": 0, "value_cache_out": 0, "output": [0.0]}, "expected a numpy array"),
    ],
)
def test_a_result_of_another_kind_is_named(outputs: Any, text: str) -> None:
    result = run_case(_Returning(outputs), CASES["core/decode_float32"])
    assert result.status == "failed"
    assert text in result.detail


class _Raising(ReferenceBackend):
    def run(self, feeds: dict[str, Any], attributes: dict[str, Any]) -> Mapping[str, Any]:
        raise IndexError("block_table is out of range")


def test_an_exception_of_another_kind_is_no_refusal() -> None:
    result = run_case(_Raising(), CASES["negative/block_id_n"])
    assert result.status == "failed"
    assert "expected a ValueError that names block_table" in result.detail
    assert "IndexError" in result.detail


def test_caches_that_are_too_large_have_one_reason() -> None:
    small = replace(Capabilities(), max_cache_bytes=1)

    class Small(ReferenceBackend):
        def capabilities(self) -> Capabilities:
            return small

    results = run_cases(Small(), [c for c in all_cases() if c.id.startswith(("core/decode_", "masks/window"))])
    assert len(results) > 4
    assert {r.detail for r in results} == {"a cache larger than max_cache_bytes=1"}
    assert not succeeded(results)


@pytest.mark.parametrize(
    "name",
    [
        "attribute_quant_type_and_scale_for_float_cache",
        "attribute_int8_without_quantisation",
        "attribute_fp8_without_quantisation",
        "attribute_qk_norm_epsilon_negative",
        "latent_int8_with_v_quant_type",
        "latent_int8_with_v_scale",
        "latent_with_v_cache_dtype",
    ],
)
def test_the_newer_rules_are_kept_and_looked_for(name: str) -> None:
    """Our backends keep each rule; one that ignores it would fail, for the call is otherwise valid."""
    case = CASES[f"negative/{name}"]
    for backend in (ReferenceBackend(), CpuBackend(threads=1)):
        assert run_case(backend, case).status == "passed"
    valid = case.call()
    assert set(ReferenceBackend().run(valid.copy().feeds, valid.attributes)) >= {"output", "key_cache_out"}
    assert run_case(_Returning({}), case).status == "failed"
