"""The contract's definition: it agrees with onnxruntime's own schema, and refuses what it must."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from pagegraft.custom_ops import spec
from pagegraft.custom_ops.errors import ContractError
from pagegraft.custom_ops.generate import stale_files
from pagegraft.custom_ops.spec import AttentionAttributes, In, cache_head_width, needs_pagegraft_domain, ordered_inputs

REQUIRED = {"num_heads": 4, "kv_num_heads": 2}


@pytest.fixture(scope="module")
def microsoft() -> Any:
    """com.microsoft::PagedAttention as the installed onnxruntime registers it."""
    schemas = [s for s in get_all_operator_schema() if s.name == "PagedAttention" and s.domain == "com.microsoft"]
    inputs = [[i.name for i in s.inputs] for s in schemas]
    if "attention_metadata" not in (inputs[0] if inputs else []):
        pytest.skip("this onnxruntime has an older PagedAttention, or none")
    return schemas[0]


def test_inputs_are_onnxruntimes(microsoft: Any) -> None:
    assert [i.name for i in microsoft.inputs] == [p.name for p in spec.INPUTS]
    assert [int(p.index) for p in spec.INPUTS] == list(range(len(spec.INPUTS)))
    for theirs, ours in zip(microsoft.inputs, spec.INPUTS, strict=True):
        assert ("Optional" in str(theirs.option)) == ours.optional, ours.name


def test_outputs_are_onnxruntimes(microsoft: Any) -> None:
    assert [o.name for o in microsoft.outputs] == [p.name for p in spec.OUTPUTS if p.microsoft_types]


def test_attributes_are_onnxruntimes(microsoft: Any) -> None:
    ours = {a.name: a for a in spec.ATTRIBUTES if not a.pagegraft_only}
    assert set(microsoft.attributes) == set(ours)
    for name, theirs in microsoft.attributes.items():
        assert str(theirs.type).split(".")[-1] == ours[name].kind
        assert theirs.required == ours[name].required
        default = onnx.AttributeProto.FromString(theirs._default_value) if theirs._default_value else None
        if default is not None and default.type:
            value = onnx.helper.get_attribute_value(default)
            assert (value.decode() if isinstance(value, bytes) else value) == ours[name].default


def test_types_are_onnxruntimes(microsoft: Any) -> None:
    names = {"float": "float32"}
    allowed = {
        t.type_param_str: {names.get(x[7:-1], x[7:-1]) for x in t.allowed_type_strs} for t in microsoft.type_constraints
    }
    for theirs, ours in zip(microsoft.inputs, spec.INPUTS, strict=True):
        assert allowed[theirs.typeStr] == set(ours.microsoft_types), ours.name


def test_attribute_table_and_dataclass_agree() -> None:
    defaults = AttentionAttributes(**REQUIRED)
    assert [a.name for a in spec.ATTRIBUTES] == list(vars(defaults))
    for a in spec.ATTRIBUTES:
        if not a.required and a.default is not None:
            assert getattr(defaults, a.name) == a.default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_heads", 0),
        ("kv_num_heads", 3),
        ("kv_num_heads", 0),
        ("local_window_size", 0),
        ("local_window_size", -2),
        ("softcap", -0.5),
        ("softcap", float("nan")),
        ("scale", float("inf")),
        ("scale", float("nan")),
        ("qk_norm_epsilon", -1e-6),
        ("qk_norm_epsilon", float("nan")),
        ("is_causal", 2),
        ("do_rotary", -1),
        ("rotary_interleaved", 3),
        ("rotary_offset", 12),
        ("rotary_offset", -8),
        ("k_quant_type", "PER_ROW"),
        ("v_quant_type", ""),
        ("k_cache_dtype", "uint4"),
        ("v_cache_dtype", "float64"),
        ("kv_cache_layout", "latent"),
        ("v_head_size", 8),
        ("alibi_slopes", (1.0,)),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ContractError, match=name):
        AttentionAttributes.from_dict({**REQUIRED, name: value})


@pytest.mark.parametrize(("name", "value"), [("scale", 0.0), ("scale", -0.5), ("qk_norm_epsilon", 0.0)])
def test_a_value_at_the_edge_is_kept(name: str, value: float) -> None:
    attributes = AttentionAttributes.from_dict({**REQUIRED, name: value})
    assert getattr(attributes, name) == value
    assert attributes.to_dict()[name] == value


def test_latent_rules() -> None:
    latent = {"num_heads": 4, "kv_num_heads": 1, "kv_cache_layout": "LATENT"}
    assert AttentionAttributes.from_dict(latent).latent
    with pytest.raises(ContractError, match="scale"):
        AttentionAttributes.from_dict({**latent, "v_head_size": 8})
    with pytest.raises(ContractError, match="kv_num_heads"):
        AttentionAttributes.from_dict({**latent, "kv_num_heads": 2})


def test_an_unknown_attribute_is_named() -> None:
    with pytest.raises(ContractError, match="sliding_window"):
        AttentionAttributes.from_dict({**REQUIRED, "sliding_window": 4})


def test_attributes_survive_the_way_through_a_node() -> None:
    a = AttentionAttributes(num_heads=4, kv_num_heads=2, softcap=2.0, alibi_slopes=(1.0, 0.5, 0.25, 0.125))
    node = onnx.helper.make_node("PagedAttention", [], [], domain="pagegraft", **a.to_dict())
    back = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    assert AttentionAttributes.from_dict(back) == a
    assert set(back) == {"num_heads", "kv_num_heads", "softcap", "alibi_slopes"}


@pytest.mark.parametrize(
    ("change", "ours"),
    [
        ({}, False),
        ({"compute_dtype": "float32"}, True),
        ({"cache_dtype": "float32"}, True),
        ({"cache_dtype": "int8"}, False),
        ({"value_head_size": 8}, True),
        ({"alibi_slopes": (1.0, 1.0, 1.0, 1.0)}, True),
        ({"k_quant_type": "PER_TOKEN"}, True),
        ({"v_quant_type": "PER_CHANNEL"}, False),
    ],
)
def test_which_domain_is_needed(change: dict[str, Any], ours: bool) -> None:
    shape = {"compute_dtype": "float16", "head_size": 16, "value_head_size": 16}
    shape |= {k: v for k, v in change.items() if k in ("compute_dtype", "cache_dtype", "value_head_size")}
    attributes = AttentionAttributes.from_dict({**REQUIRED, **{k: v for k, v in change.items() if k not in shape}})
    assert needs_pagegraft_domain(attributes, **shape) is ours


def test_a_narrower_latent_value_needs_no_domain_of_ours() -> None:
    latent = AttentionAttributes(num_heads=4, kv_num_heads=1, kv_cache_layout="LATENT", v_head_size=8, scale=0.1)
    assert not needs_pagegraft_domain(latent, compute_dtype="float16", head_size=16, value_head_size=8)


@pytest.mark.parametrize(("size", "dtype", "width"), [(16, "int4", 8), (5, "int4", 3), (5, "int8", 5), (1, "int4", 1)])
def test_cache_width(size: int, dtype: str, width: int) -> None:
    assert cache_head_width(size, dtype) == width


def test_inputs_are_put_in_order() -> None:
    required = {p.name: p.name for p in spec.INPUTS if not p.optional}
    ordered = ordered_inputs({**required, "slot_mapping": "s"})
    assert len(ordered) == In.SLOT_MAPPING + 1
    assert ordered[In.SLOT_MAPPING] == "s"
    assert ordered[In.KEY] is None
    with pytest.raises(ContractError, match="tables"):
        ordered_inputs({**required, "tables": "x"})
    del required["block_table"]
    with pytest.raises(ContractError, match="block_table"):
        ordered_inputs(required)


def test_derived_files_are_fresh() -> None:
    """README.md's tables and the C++ header say what spec.py says."""
    assert stale_files() == []
