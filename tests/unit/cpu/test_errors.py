"""What the op refuses: at session creation by attribute, at run time by input, always with expected and got."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from op_calls import Feeds, make_feeds, make_session
from pagegraft.custom_ops import register
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.conformance.node_model import node_model
from pagegraft.custom_ops.spec import MICROSOFT_DOMAIN, PAGEGRAFT_DOMAIN

ATTRIBUTES = {"num_heads": 4, "kv_num_heads": 2}


def set_value(name: str, index: Any, value: int) -> Callable[[Feeds], None]:
    def change(feeds: Feeds) -> None:
        feeds[name][index] = value

    return change


def cut(name: str, axis: int) -> Callable[[Feeds], None]:
    def change(feeds: Feeds) -> None:
        feeds[name] = np.ascontiguousarray(np.delete(feeds[name], -1, axis))

    return change


RUN_TIME: list[tuple[Callable[[Feeds], None], tuple[str, ...]]] = [
    (set_value("block_table", (0, 0), 99), ("'block_table'", "from -1 to 3", "99 at logical block 0")),
    (set_value("block_table", (0, 1), -2), ("'block_table'", "-2 at logical block 1")),
    (set_value("past_seqlens", 0, -1), ("'past_seqlens'", "at least 0", "-1 for sequence 0")),
    (set_value("past_seqlens", 0, 6), ("'block_table'", "at least 3 blocks", "shape [1, 2]")),
    (set_value("cumulative_sequence_length", 0, 1), ("'cumulative_sequence_length'", "element 0 to be 0", "got 1")),
    (set_value("cumulative_sequence_length", 1, 2), ("'cumulative_sequence_length'", "number of tokens 3", "got 2")),
    (cut("query", 1), ("'query'", "multiple of num_heads=4", "[3, 63]")),
    (cut("key", 1), ("'key'", "[3, 32]", "[3, 31]")),
    (cut("value", 0), ("'value'", "[3, ", "[2, 32]")),
    (cut("key_cache", 1), ("'key_cache'", "power of two up to 512", "[4, 3, 2, 16]")),
    (cut("value_cache", 0), ("'value_cache'", "[4, 4, 2, 16]", "[3, 4, 2, 16]")),
    (cut("past_seqlens", 0), ("'block_table'", "each of the 0 sequences", "[1, 2]")),
]


@pytest.mark.parametrize(("change", "words"), RUN_TIME)
def test_run_time_error_names_input_expected_and_got(change: Callable[[Feeds], None], words: tuple[str, ...]) -> None:
    feeds = make_feeds([(4, 3)])
    change(feeds)
    session = make_session(feeds, ATTRIBUTES)
    with pytest.raises(Exception, match="PagedAttention input") as error:
        session.run(None, feeds)
    for word in words:
        assert word in str(error.value)


def test_bad_id_left_of_the_window_or_behind_the_end_is_ignored() -> None:
    feeds = make_feeds([(8, 1), (0, 1)])
    feeds["block_table"][0, 0] = 12345  # positions 0..3, the window sees 7 and 8
    feeds["block_table"][1, 1:] = -77
    session = make_session(feeds, {**ATTRIBUTES, "local_window_size": 2})
    assert np.isfinite(session.run(["output"], feeds)[0]).all()


@pytest.mark.parametrize("slot", [-2, 16])
def test_slot_outside_of_the_pool_is_an_error(slot: int) -> None:
    feeds = make_feeds([(4, 3)])
    feeds["slot_mapping"] = np.array([0, slot, 2], np.int32)
    with pytest.raises(Exception, match=rf"'slot_mapping': expected slots from -1 to 15, got {slot} for token 1"):
        make_session(feeds, ATTRIBUTES).run(None, feeds)


CREATION: list[tuple[dict[str, Any], str, str]] = [
    ({"num_heads": 0}, "pagegraft", "'num_heads': expected at least 1, got 0"),
    ({"kv_num_heads": 3}, "pagegraft", "'kv_num_heads': expected a divisor of num_heads=4, got 3"),
    ({"local_window_size": 0}, "pagegraft", "'local_window_size'.*got 0"),
    ({"softcap": -1.0}, "pagegraft", "'softcap'.*got -1"),
    ({"is_causal": 2}, "pagegraft", "'is_causal': expected 0 or 1, got '2'"),
    ({"rotary_offset": 4}, "pagegraft", "'rotary_offset'.*multiple of 8, got 4"),
    ({"k_quant_type": "PER_ROW"}, "pagegraft", "'k_quant_type'.*got 'PER_ROW'"),
    ({"k_quant_type": "PER_TENSOR"}, "pagegraft", "'k_quant_type': expected NONE"),
    ({"k_cache_dtype": "int4"}, "pagegraft", "'k_cache_dtype'.*float32.*got 'int4'"),
    ({"kv_cache_layout": "PLANES"}, "pagegraft", "'kv_cache_layout'.*got 'PLANES'"),
    ({"v_head_size": 8}, "pagegraft", "'v_head_size'.*got 8"),
    ({"alibi_slopes": [0.1, 0.2, 0.3]}, "pagegraft", "'alibi_slopes': expected num_heads=4 values, got 3"),
    ({"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, "com.microsoft", "'alibi_slopes'.*domain com.microsoft"),
    ({"scale": 1}, "pagegraft", "'scale'"),
]


@pytest.mark.parametrize(("attributes", "domain", "pattern"), CREATION)
def test_attribute_is_refused_when_the_session_is_created(
    attributes: dict[str, Any], domain: str, pattern: str
) -> None:
    feeds = make_feeds([(4, 3)])
    with pytest.raises(Exception, match=f"PagedAttention attribute {pattern}"):
        make_session(feeds, {**ATTRIBUTES, **attributes}, domain=domain)


def test_per_token_scales_are_refused_in_the_microsoft_domain() -> None:
    feeds = make_feeds([(4, 3)])
    for name in ("key_cache", "value_cache"):
        feeds[name] = feeds[name].astype(np.int8)
    for letter in "kv":
        feeds[f"{letter}_scale"] = np.ones((4, 2, 4), np.float32)
    attributes = {**ATTRIBUTES, "k_quant_type": "PER_TOKEN", "v_quant_type": "PER_TOKEN"}
    make_session(feeds, attributes)
    model = node_model(Call(feeds, attributes), PAGEGRAFT_DOMAIN, concrete=False)
    model.graph.node[0].domain = model.opset_import[-1].domain = MICROSOFT_DOMAIN
    del model.graph.node[0].output[3:]  # the scales' outputs, which that domain does not have
    del model.graph.output[3:]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register(options)
    with pytest.raises(Exception, match=r"'k_quant_type'.*only domain pagegraft has it"):
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_unknown_instruction_set_is_refused_by_name() -> None:
    code = (
        "from op_calls import *; f = make_feeds([(4, 3)]);\n"
        "try: make_session(f, {'num_heads': 4, 'kv_num_heads': 2})\n"
        "except Exception as e: print(e)"
    )
    environment = {**os.environ, "PAGEGRAFT_ISA": "avx9", "PYTHONPATH": os.path.dirname(__file__)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "PAGEGRAFT_ISA" in output
    assert "'avx9'" in output
    assert "scalar" in output


LACKING: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("value",), {}, "'value': expected a tensor \\(key and value come together\\)"),
    (("value_cache",), {}, "'value_cache': expected a tensor \\(kv_cache_layout is SEPARATE\\)"),
    ((), {"do_rotary": 1}, "'cos_cache': expected a tensor \\(do_rotary is 1\\)"),
    ((), {"kv_cache_layout": "LATENT", "num_heads": 2, "kv_num_heads": 1}, "'value': expected nothing"),
]


@pytest.mark.parametrize(("left_out", "attributes", "pattern"), LACKING)
def test_node_without_an_input_it_needs_is_refused_when_the_session_is_created(
    left_out: tuple[str, ...], attributes: dict[str, Any], pattern: str
) -> None:
    feeds = make_feeds([(4, 3)])
    for name in left_out:
        del feeds[name]
    with pytest.raises(Exception, match=f"PagedAttention input {pattern}"):
        make_session(feeds, {**ATTRIBUTES, **attributes})
