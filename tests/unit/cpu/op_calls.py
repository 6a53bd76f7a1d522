"""Small calls of the op for the tests beside this file: random feeds, and sessions bound as the runtime binds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from pagegraft.custom_ops import register
from pagegraft.custom_ops.conformance.call import Call
from pagegraft.custom_ops.conformance.node_model import node_model
from pagegraft.custom_ops.spec import PAGEGRAFT_DOMAIN

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]


def make_feeds(
    lengths: Sequence[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, head_size: int = 16, block_size: int = 4
) -> Feeds:
    """Float32 feeds for sequences given as (past, new), with disjoint shuffled blocks and slots in their tables."""
    rng = np.random.default_rng([3, *(n for pair in lengths for n in pair)])
    tokens = sum(new for _, new in lengths)
    width = max(1, max(-(-(past + new) // block_size) for past, new in lengths))
    blocks = len(lengths) * width + 2
    table = rng.permutation(blocks)[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "query": normal(tokens, heads * head_size),
        "key": normal(tokens, kv_heads * head_size),
        "value": normal(tokens, kv_heads * head_size),
        "key_cache": normal(blocks, block_size, kv_heads, head_size),
        "value_cache": normal(blocks, block_size, kv_heads, head_size),
        "cumulative_sequence_length": np.cumsum([0, *(new for _, new in lengths)]).astype(np.int32),
        "past_seqlens": np.array([past for past, _ in lengths], np.int32),
        "block_table": table,
    }


def make_session(
    feeds: Feeds, attributes: dict[str, Any], *, threads: int = 1, domain: str = PAGEGRAFT_DOMAIN
) -> ort.InferenceSession:
    """A session on one node of the op with symbolic shapes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    register(options)
    model = node_model(Call(feeds, attributes), domain, concrete=False)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_bound(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> Array:
    """Runs with each cache bound as input and output alike; returns the attention output."""
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        if output.name == "output":
            binding.bind_output("output", "cpu")
        else:
            binding.bind_ortvalue_output(output.name, values[output.name.removesuffix("_out")])
    session.run_with_iobinding(binding)
    result: Array = binding.get_outputs()[[o.name for o in session.get_outputs()].index("output")].numpy()
    return result


def copied(feeds: Feeds) -> Feeds:
    """A deep copy, for calls that update caches in place."""
    return {name: array.copy() for name, array in feeds.items()}
