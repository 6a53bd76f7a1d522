"""Caches are updated in the memory that is bound, copied when they must be, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from op_calls import copied, make_feeds, make_session, run_bound
from pagegraft.custom_ops import register
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.conformance.node_model import node_model
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import PAGEGRAFT_DOMAIN, AttentionAttributes

ATTRIBUTES = {"num_heads": 4, "kv_num_heads": 2}


def test_bound_cache_is_updated_in_its_own_memory() -> None:
    feeds = make_feeds([(5, 3), (0, 6)])
    expected = paged_attention(copied(feeds), AttentionAttributes.from_dict(ATTRIBUTES))
    output = run_bound(make_session(feeds, ATTRIBUTES), feeds)
    np.testing.assert_allclose(output, expected["output"], atol=2e-6)
    for name in ("key_cache", "value_cache"):
        np.testing.assert_array_equal(feeds[name], expected[f"{name}_out"])


def test_unbound_cache_is_copied_and_the_input_left_alone() -> None:
    feeds = make_feeds([(5, 3)])
    before = copied(feeds)
    session = make_session(feeds, ATTRIBUTES)
    outputs = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    expected = paged_attention(copied(before), AttentionAttributes.from_dict(ATTRIBUTES))
    for name in ("key_cache", "value_cache"):
        np.testing.assert_array_equal(feeds[name], before[name])
        np.testing.assert_array_equal(outputs[f"{name}_out"], expected[f"{name}_out"])


def test_caches_stay_in_place_with_several_threads() -> None:
    feeds = make_feeds([(9, 2)])
    expected = paged_attention(copied(feeds), AttentionAttributes.from_dict(ATTRIBUTES))
    run_bound(make_session(feeds, ATTRIBUTES, threads=2), feeds)
    np.testing.assert_array_equal(feeds["key_cache"], expected["key_cache_out"])


def test_tokens_without_a_slot_leave_the_cache_alone() -> None:
    feeds = make_feeds([(5, 3)])
    feeds["slot_mapping"] = np.full(3, -1, np.int32)
    before = copied(feeds)
    run_bound(make_session(feeds, ATTRIBUTES), feeds)
    np.testing.assert_array_equal(feeds["key_cache"], before["key_cache"])
    np.testing.assert_array_equal(feeds["value_cache"], before["value_cache"])


@pytest.mark.parametrize("passed", [2**31, 2**32])
def test_block_whose_byte_offset_does_not_fit_in_32_bits(passed: int, tmp_path: Path) -> None:
    feeds = make_feeds([(5, 3)])
    attributes = {**ATTRIBUTES}
    expected = paged_attention(copied(feeds), AttentionAttributes.from_dict(attributes))
    block_bytes = feeds["key_cache"][0].nbytes
    blocks = passed // block_bytes + 8
    used = feeds["block_table"][0]
    moved = np.arange(blocks - len(used), blocks, dtype=np.int32)[::-1]
    for name in ("key_cache", "value_cache"):
        # Only the pages that are touched take space.
        shape = (blocks, *feeds[name].shape[1:])
        sparse = np.memmap(tmp_path / name, np.float32, "w+", shape=shape).view(np.ndarray)
        sparse[moved] = feeds[name][used]
        feeds[name] = sparse
    feeds["block_table"] = moved[None, :].copy()
    output = run_bound(make_session(feeds, attributes), feeds)
    np.testing.assert_allclose(output, expected["output"], atol=2e-6)
    np.testing.assert_array_equal(feeds["key_cache"][moved], expected["key_cache_out"][used])


def test_shapes_behind_the_op_are_inferred() -> None:
    """The output keeps the symbolic number of tokens and gets its width; onnxruntime carries both on."""
    feeds = make_feeds([(5, 3)])
    model = node_model(Call(feeds, ATTRIBUTES), PAGEGRAFT_DOMAIN, concrete=False)
    for info in model.graph.input:
        shape = {"query": ("T", 64), "key": ("T", 32), "value": ("T", 32)}.get(info.name)
        if shape is None and info.name.endswith("_cache"):
            shape = ("N", 4, 2, 16)
        if shape is not None:
            kind = info.type.tensor_type.elem_type
            info.CopyFrom(helper.make_tensor_value_info(info.name, kind, shape))
    del model.graph.output[:]
    model.graph.node.append(helper.make_node("Transpose", ["output"], ["swapped"], perm=[1, 0]))
    model.graph.output.append(helper.make_tensor_value_info("swapped", TensorProto.FLOAT, None))
    if not any(opset.domain == "" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", 21))
    options = ort.SessionOptions()
    register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].shape == [64, "T"]


def test_results_come_from_onnxruntime_memory_too() -> None:
    feeds = make_feeds([(5, 3)])
    expected = paged_attention(copied(feeds), AttentionAttributes.from_dict(ATTRIBUTES))
    for name in ("key_cache", "value_cache"):
        value = ort.OrtValue.ortvalue_from_shape_and_type(list(feeds[name].shape), np.float32, "cpu")
        view = value.numpy()
        view[:] = feeds[name]
        feeds[name] = view
    output = run_bound(make_session(feeds, ATTRIBUTES), feeds)
    np.testing.assert_allclose(output, expected["output"], atol=2e-6)
