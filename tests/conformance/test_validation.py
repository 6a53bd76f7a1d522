"""The validation of feeds: what the suite's negative cases cannot say, and that each message names its input."""

from __future__ import annotations

import numpy as np
import pytest
from pagegraft.custom_ops.conformance.call import Setup, build
from pagegraft.custom_ops.errors import ContractError
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import INPUTS
from pagegraft.custom_ops.validation import geometry_of, visible_range


def test_an_unknown_input_is_named() -> None:
    call = build(Setup(), 0)
    call.feeds["attention_mask"] = np.ones(4, np.int32)
    with pytest.raises(ContractError, match="attention_mask"):
        paged_attention(call.feeds, call.parsed())


@pytest.mark.parametrize("name", [p.name for p in INPUTS if not p.optional])
def test_a_missing_required_input_is_named(name: str) -> None:
    call = build(Setup(), 0)
    del call.feeds[name]
    with pytest.raises(ContractError, match=name):
        paged_attention(call.feeds, call.parsed())


def test_the_message_says_what_was_expected_and_what_was_given() -> None:
    call = build(Setup(), 0)
    call.feeds["slot_mapping"] = np.zeros(3, np.int32)
    with pytest.raises(ContractError, match=r"slot_mapping: expected shape \[8\], got \[3\]"):
        paged_attention(call.feeds, call.parsed())


def test_feeds_are_not_modified_unless_asked() -> None:
    call = build(Setup(cache="int8", k_quant="PER_TOKEN"), 0)
    before = {n: a.tobytes() for n, a in call.feeds.items()}
    outputs = paged_attention(call.feeds, call.parsed())
    assert before == {n: a.tobytes() for n, a in call.feeds.items()}
    paged_attention(call.feeds, call.parsed(), in_place=True)
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        assert call.feeds[name].tobytes() == outputs[f"{name}_out"].tobytes() != before[name]


@pytest.mark.parametrize(
    ("head_size", "value_head_size", "heads"), [(5, 7, 2), (6, 6, 4), (7, 8, 4), (8, 7, 1), (1, 1, 2), (2, 1, 2)]
)
def test_packed_int4_sizes_follow_from_the_width(head_size: int, value_head_size: int, heads: int) -> None:
    setup = Setup(
        query_heads=2 * heads, kv_heads=heads, head_size=head_size, value_head_size=value_head_size, packed=True,
        cache="int4", k_quant="PER_TENSOR",
    )  # fmt: skip
    call = build(setup, 1)
    g = geometry_of(call.feeds, call.parsed())
    assert (g.head_size, g.value_head_size) == (head_size, value_head_size)


def test_visible_range() -> None:
    plain = build(Setup(), 0).parsed()
    windowed = build(Setup(attributes={"local_window_size": 4}), 0).parsed()
    assert visible_range(9, 3, plain) == (0, 12)
    assert visible_range(9, 3, windowed) == (6, 12)  # the first new token, at 9, sees 6 to 9
    assert visible_range(2, 1, windowed) == (0, 3)
    assert visible_range(9, 0, windowed) == (0, 0)
