"""The operator project's host side, compiled against a host model of CANN's headers and run: definition, inference,
tiling, ONNX plugin."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascend_calls import half_call
from pagegraft.custom_ops.ascend.build import ROOT, STRICT_FLAGS, run_compiler
from pagegraft.custom_ops.ascend.emulation import Device, tiling_bytes_of
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.spec import ATTRIBUTES, INPUTS, MICROSOFT_DOMAIN, OP_TYPE, OUTPUTS, PAGEGRAFT_DOMAIN

DT = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bfloat16": 27}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("host") / "libhost.so"
    sources = [
        *sorted((ROOT / "op_host").glob("*.cpp")),
        ROOT / "framework" / "onnx_plugin" / "paged_attention_plugin.cc",
        ROOT / "emulator" / "host" / "host_driver.cpp",
    ]
    include = f"-I{ROOT / 'emulator' / 'host' / 'include'}"
    run_compiler(["g++", *STRICT_FLAGS, "-O0", "-shared", include, *map(str, sources), "-o", str(path)])
    library = ctypes.CDLL(str(path))
    library.pg_host_node.restype = ctypes.c_void_p
    for name in ("describe", "infer", "parse", "tile"):
        getattr(library, f"pg_host_{name}").restype = ctypes.c_int64
    return library


def _text(function: Any, *arguments: Any) -> str:
    out = ctypes.create_string_buffer(1 << 14)
    assert function(*arguments, out, ctypes.c_int64(len(out))) >= 0
    return out.value.decode()


@pytest.fixture
def node(host: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    pointer = ctypes.c_void_p(host.pg_host_node())
    yield pointer
    host.pg_host_free(pointer)


def _fill(
    host: ctypes.CDLL, node: ctypes.c_void_p, call: Call, shapes: dict[str, tuple[int, ...]] | None = None
) -> None:
    """Gives the node the call's inputs (with other shapes for those in `shapes`) and attributes."""
    for spec in INPUTS:
        if spec.name in call.feeds:
            array = call.feeds[spec.name]
            dims = (shapes or {}).get(spec.name, array.shape)
            kind = ctypes.c_int64(DT[array.dtype.name])
            host.pg_host_input(node, ctypes.c_int64(spec.index), kind, (ctypes.c_int64 * len(dims))(*dims), len(dims))
    for index, attribute in enumerate(ATTRIBUTES):
        value = call.attributes.get(attribute.name, attribute.default)
        if value is None:
            continue
        if attribute.kind == "INT":
            host.pg_host_int(node, ctypes.c_int64(index), ctypes.c_int64(value))
        elif attribute.kind == "FLOAT":
            host.pg_host_float(node, ctypes.c_int64(index), ctypes.c_float(value))
        elif attribute.kind == "STRING":
            host.pg_host_string(node, ctypes.c_int64(index), value.encode())
        else:
            host.pg_host_floats(
                node, ctypes.c_int64(index), (ctypes.c_float * len(value))(*value), ctypes.c_int64(len(value))
            )


def test_definition_is_the_contract(host: ctypes.CDLL) -> None:
    lines = [line.split(" ") for line in _text(host.pg_host_describe).splitlines()]
    assert ["type", OP_TYPE] in lines
    inputs = [(line[1], line[2] == "optional") for line in lines if line[0] == "input"]
    assert inputs == [(spec.name, spec.optional) for spec in INPUTS]
    assert [line[1] for line in lines if line[0] == "output"] == ["output", "key_cache", "value_cache"]
    found = {line[1]: (line[2] == "required", line[3], line[4]) for line in lines if line[0] == "attribute"}
    assert list(found) == [a.name for a in ATTRIBUTES]
    for attribute in ATTRIBUTES:
        required, kind, initial = found[attribute.name]
        assert (required, kind) == (attribute.required, attribute.kind)
        if attribute.default is not None:
            assert initial == str(attribute.default) or float(initial) == pytest.approx(attribute.default)
    origins = {line[1] for line in lines if line[0] == "origin"}
    assert origins == {f"{domain}::1::{OP_TYPE}" for domain in (MICROSOFT_DOMAIN, PAGEGRAFT_DOMAIN)}


def test_each_type_column_is_one_compiled_variant(host: ctypes.CDLL) -> None:
    lines = [line.split(" ") for line in _text(host.pg_host_describe).splitlines()]
    columns = {line[1]: line[3:] for line in lines if line[0] in ("input", "output")}
    assert len({len(types) for types in columns.values()}) == 1
    pairs = list(zip(columns["query"], columns["key_cache"], strict=True))
    floats = [str(DT[name]) for name in ("float16", "bfloat16", "float32")]
    assert pairs == [(f, f) for f in floats] + [(f, str(DT["int8"])) for f in floats]
    assert columns["output"] == columns["query"]


def test_kernel_takes_the_definition_s_tensors_in_order() -> None:
    source = (ROOT / "op_kernel" / "paged_attention.cpp").read_text()
    parameters = re.search(r"paged_attention\(\s*(.*?)\)\s*{", source, re.S)
    assert parameters is not None
    names = re.findall(r"GM_ADDR (\w+)", parameters[1])
    assert names == [spec.name for spec in INPUTS] + [spec.name for spec in OUTPUTS[:3]] + ["workspace", "tiling"]


@pytest.mark.parametrize("tokens", [8, -1])
def test_inference(host: ctypes.CDLL, node: ctypes.c_void_p, tokens: int) -> None:
    call = half_call(value_head_size=48)
    cache, values = call.feeds["key_cache"].shape, call.feeds["value_cache"].shape
    dynamic = (-1, -1, *cache[2:])
    shapes = {"query": (tokens, 64), "key_cache": dynamic, "value_cache": (*dynamic[:3], values[3])}
    _fill(host, node, call, shapes)
    lines = [[int(x) for x in line.split()] for line in _text(host.pg_host_infer, node).splitlines()]
    assert lines == [[DT["float16"], tokens, 4 * 48], [DT["float16"], *dynamic], [DT["float16"], *dynamic[:3], 48]]


def test_inference_fails_without_a_value_cache(host: ctypes.CDLL, node: ctypes.c_void_p) -> None:
    call = half_call()
    del call.feeds["value_cache"]
    _fill(host, node, call)
    assert _text(host.pg_host_infer, node) == ""


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"packed": True, "compute": "bfloat16", "attributes": {"scale": 0.5, "softcap": 2.0}},
        {"cache": "int8", "k_quant": "PER_CHANNEL", "v_quant": "PER_TENSOR", "sink": True, "slots": "explicit"},
        {"attributes": {"alibi_slopes": [0.5, 0.25, 0.1, 0.2], "local_window_size": 7, "is_causal": 0}},
        {"attributes": {"scale": 0.0}},
    ],
)
def test_tiling_from_a_context_is_what_the_emulator_runs(
    host: ctypes.CDLL, node: ctypes.c_void_p, setup: dict[str, Any]
) -> None:
    call = half_call(**setup)
    _fill(host, node, call)
    expected = tiling_bytes_of(call.feeds, call.parsed(), Device(vector_cores=48))
    data, sizes = ctypes.create_string_buffer(len(expected)), (ctypes.c_int64 * 3)()
    assert host.pg_host_tile(node, ctypes.c_int64(48), data, sizes) == 0
    assert data.raw == expected
    assert 1 <= sizes[0] <= 48
    assert sizes[1] == 1, "SyncAll needs every core to start together"
    assert sizes[2] >= 16 * 2**20, "the system's own workspace comes on top"


@pytest.mark.parametrize("text", ["{:f}", "{:g}"], ids=["fixed", "six digits"])
def test_an_absent_scale_is_the_default_and_zero_is_zero(host: ctypes.CDLL, text: str) -> None:
    """The definition's initial value passes through text on its way to the tiling; it must not become a scale."""
    lines = [line.split(" ") for line in _text(host.pg_host_describe).splitlines()]
    (initial,) = [float(line[4]) for line in lines if line[:2] == ["attribute", "scale"]]
    tilings = {}
    for given in (None, float(text.format(initial)), 0.25, 0.0):
        call = half_call(head_size=16)
        call.attributes.pop("scale", None)
        if given is not None:
            call.attributes["scale"] = given
        node = ctypes.c_void_p(host.pg_host_node())
        _fill(host, node, call)
        data = ctypes.create_string_buffer(4096)
        assert host.pg_host_tile(node, ctypes.c_int64(48), data, (ctypes.c_int64 * 3)()) == 0
        host.pg_host_free(node)
        tilings[given] = data.raw
    absent, spelled, quarter, zero = tilings.values()
    assert absent == spelled == quarter  # 1 / sqrt(16)
    assert zero != absent


def test_tiling_refuses_what_the_kernel_lacks(host: ctypes.CDLL, node: ctypes.c_void_p) -> None:
    _fill(host, node, half_call(head_size=24))
    assert host.pg_host_tile(node, ctypes.c_int64(48), ctypes.create_string_buffer(4096), (ctypes.c_int64 * 3)()) != 0


def _parse(host: ctypes.CDLL, attributes: list[dict[str, Any]]) -> dict[str, str]:
    text = json.dumps({"attribute": attributes})
    return dict(line.split("=", 1) for line in _text(host.pg_host_parse, text.encode()).splitlines())


def test_plugin_carries_every_attribute(host: ctypes.CDLL) -> None:
    values: dict[str, Any] = {}
    listed: list[dict[str, Any]] = []
    for i, attribute in enumerate(ATTRIBUTES, 1):
        if attribute.kind == "INT":
            values[attribute.name] = i
            listed.append({"name": attribute.name, "type": 2, "i": i})
        elif attribute.kind == "FLOAT":
            values[attribute.name] = i / 7
            listed.append({"name": attribute.name, "type": 1, "f": f"{i / 7:.9g}"})
        elif attribute.kind == "STRING":
            values[attribute.name] = f"text {i}"
            listed.append({"name": attribute.name, "type": 3, "s": f"text {i}"})
        else:
            values[attribute.name] = [0.5, -2.0]
            listed.append({"name": attribute.name, "type": 6, "floats": [0.5, "-2.0"]})
    got = _parse(host, listed)
    assert set(got) == {a.name for a in ATTRIBUTES}
    for name, value in values.items():
        if isinstance(value, list):
            assert [float(x) for x in got[name].split(",")] == value
        elif isinstance(value, float):
            assert np.float32(got[name]) == np.float32(value)
        else:
            assert got[name] == str(value)


def test_plugin_reads_zeros_that_the_parser_leaves_out(host: ctypes.CDLL) -> None:
    heads = [{"name": "num_heads", "type": 2, "i": 4}, {"name": "kv_num_heads", "type": 2, "i": 2}]
    got = _parse(
        host, [*heads, {"name": "is_causal", "type": 2}, {"name": "softcap", "type": 1}, {"name": "k_cache_dtype"}]
    )
    assert (got["is_causal"], float(got["softcap"]), got["k_cache_dtype"]) == ("0", 0.0, "")
    assert "scale" not in got, "an attribute that the node does not have keeps the definition's default"


@pytest.mark.parametrize(
    "text", ["", "{", '{"attribute": [', '{"attribute": [{"name": "num_heads"', "[]", '{"attribute": []}']
)
def test_plugin_refuses_text_that_is_not_a_node(host: ctypes.CDLL, text: str) -> None:
    out = ctypes.create_string_buffer(64)
    assert host.pg_host_parse(text.encode(), out, ctypes.c_int64(64)) == -1


def test_build_files_are_well_formed_and_refuse_without_cann() -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    variables = presets["configurePresets"][0]["cacheVariables"]
    assert variables["ASCEND_COMPUTE_UNIT"]["value"] == "ascend910b"
    done = subprocess.run(["sh", str(ROOT / "build.sh")], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0
    assert "set_env.sh" in done.stderr


def test_every_source_begins_with_its_purpose() -> None:
    for folder in ("op_host", "op_kernel", "framework", "emulator", "torch"):
        for path in Path(ROOT / folder).rglob("*"):
            if path.suffix in (".h", ".cpp", ".cc"):
                assert path.read_text().startswith("//"), path
