"""PagedAttention by torch_npu's own operators, with a stand-in for torch_npu that follows its documented signatures."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from ascend_calls import half_call
from pagegraft.custom_ops.ascend.torch.npu_ops import torch_npu_attention
from pagegraft.custom_ops.ascend.torch.op import _as_numpy, _as_tensor, import_torch
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.conformance.check import check_outputs
from pagegraft.custom_ops.errors import ContractError
from pagegraft.custom_ops.reference import paged_attention as reference
from pagegraft.custom_ops.spec import INPUTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


class StandIn:
    """The two operators as their documentation describes them, in plain torch."""

    @staticmethod
    def _npu_reshape_and_cache(*, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any) -> None:
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_indices.long()] = rows

    @staticmethod
    def npu_fused_infer_attention_score(query: Any, keys: Any, values: Any, **given: Any) -> tuple[Any, Any]:
        torch = import_torch()
        assert (given["input_layout"], given["sparse_mode"], given["block_size"]) == ("TND", 3, keys.shape[1])
        heads, size = given["num_key_value_heads"], keys.shape[1]
        out, start = torch.empty_like(query), 0
        for s, (end, total) in enumerate(zip(given["actual_seq_lengths"], given["actual_seq_lengths_kv"], strict=True)):
            blocks = given["block_table"][s, : -(-total // size)].long()
            k, v = (c[blocks].reshape(-1, heads, query.shape[2])[:total].float() for c in (keys, values))
            q = query[start:end].float().view(end - start, heads, -1, query.shape[2])
            scores = torch.einsum("tgrd,jgd->tgrj", q, k) * given["scale"]
            hidden = torch.arange(total)[None] > torch.arange(total - (end - start), total)[:, None]
            weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
            out[start:end] = torch.einsum("tgrj,jgd->tgrd", weights, v).reshape(out[start:end].shape).to(out.dtype)
            start = end
        return out, None


def _run(call: Call) -> dict[str, Any]:
    tensors = {name: _as_tensor(array.copy()) for name, array in call.feeds.items()}
    op = torch_npu_attention(import_torch(), StandIn)
    output = op(*(tensors.get(spec.name) for spec in INPUTS), **call.attributes)
    return {name: _as_numpy(t) for name, t in {
        "output": output, "key_cache_out": tensors["key_cache"], "value_cache_out": tensors["value_cache"],
    }.items()}  # fmt: skip


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_plain_causal_attention(compute: str) -> None:
    call = half_call(compute=compute, block_size=128, new=(1, 6, 2), past=(200, 0, 130), slots="explicit")
    check_outputs(call, _run(call), reference)


def test_a_scale_of_zero() -> None:
    call = half_call(block_size=128, new=(1, 6), past=(200, 0), slots="explicit", attributes={"scale": 0.0})
    check_outputs(call, _run(call), reference)


def test_tokens_without_a_slot_are_not_written() -> None:
    call = half_call(block_size=128, new=(2, 1), past=(3, 9), slots="explicit", skipped=(1,))
    check_outputs(call, _run(call), reference)


@pytest.mark.parametrize(
    ("setup", "word"),
    [
        ({}, "slot_mapping"),
        ({"packed": True}, "packed QKV"),
        ({"compute": "float32"}, "float32"),
        ({"cache": "int8", "k_quant": "PER_TENSOR"}, "quantised"),
        ({"sink": True}, "head_sink"),
        ({"attributes": {"softcap": 2.0}}, "softcap"),
        ({"attributes": {"local_window_size": 4}}, "local_window_size"),
        ({"attributes": {"alibi_slopes": [1.0] * 4}}, "alibi_slopes"),
        ({"attributes": {"is_causal": 0}}, "is_causal"),
        ({"block_size": 16}, "block size 16"),
    ],
)
def test_what_they_cannot_do_is_refused_by_name(setup: dict[str, Any], word: str) -> None:
    slots = {} if word == "slot_mapping" else {"slots": "explicit"}
    call = half_call(**{"block_size": 128, **slots, **setup})
    before = call.copy()
    with pytest.raises(ContractError, match=rf"{word}.*operator package"):
        _run(call)
    assert np.array_equal(call.feeds["key_cache"], before.feeds["key_cache"])
