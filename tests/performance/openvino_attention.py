"""OpenVINO's PagedAttention on CPU in a model of its own, for op_bench.py; it needs the `openvino` wheel.

Its Python constructor is experimental: the order of its 28 inputs is that of 2026.4, where blocks hold 32 tokens on CPU
and caches are [blocks, KV heads, 32, head size], updated in place as ours are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import openvino
from attention_models import Array, Run, Shape, paged_output, shuffled_tables
from openvino import Type, opset13
from openvino.op import _PagedAttentionExtension

__all__ = ["PRECISIONS", "openvino_attention"]

_BLOCK = 32
_CHECKED = {"sequences": 3, "past": 99, "block_size": _BLOCK}
#: Our name of a cache type: OpenVINO's, and how far outputs may be from our op's with float32 caches. The first tokens
#: see little but their own values, up to 5, which f16 rounds by up to 2e-3 and u8, with a range per token, by 2e-2.
PRECISIONS = {"float32": ("f32", 2e-5), "float16": ("f16", 4e-3), "int8": ("u8", 5e-2)}
_NUMPY = {"f32": np.float32, "f16": np.float16, "u8": np.uint8}
_CACHES = ("key_cache", "value_cache")
_PACKED = ("query", "key", "value")


def openvino_attention(shape: Shape, *, cache: str, threads: int) -> Run:
    """A step of float32 arithmetic on caches of the type given, after a check of its results on another shape.

    Raises RuntimeError where a result is further from our op's than the cache type explains.
    """
    precision, tolerance = PRECISIONS[cache]
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": precision,
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",  # faster than its default for u8, and what our int8 does
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(_model(shape), "CPU", properties)
    _check(compiled, replace(shape, **_CHECKED), precision, tolerance)
    shape = shape.with_block(_BLOCK)
    tables = shuffled_tables(shape, shape.copies(cache))
    request = _Step(compiled, _caches(compiled, tables.size, precision))
    request.fill(shape)
    request.bind(_drawn(shape), [shape.past] * shape.sequences, tables[0])
    in_turn = cycle(tables)

    def run() -> None:
        request.bind_table(next(in_turn))
        request.run()

    return run


def _drawn(shape: Shape) -> list[Array]:
    """Query, key and value of the step's tokens, others at each length of past."""
    draw = np.random.default_rng(shape.past).standard_normal
    return [draw((shape.sequences * shape.new, width), np.float32) for width in _widths(shape)]


def _widths(shape: Shape) -> tuple[int, int, int]:
    key = shape.kv_heads * shape.head_size
    return shape.heads * shape.head_size, key, key


def _model(shape: Shape) -> openvino.Model:
    def given(name: str, kind: Type, *dims: int) -> Any:
        return opset13.parameter(openvino.PartialShape(list(dims)), kind, name=name)

    def constant(value: Any, kind: type = np.int32) -> Any:
        return opset13.constant(np.asarray(value, kind))

    packed = [given(n, Type.f32, -1, w) for n, w in zip(_PACKED, _widths(shape), strict=True)]
    caches = [given(name, Type.dynamic, -1, shape.kv_heads, -1, shape.head_size) for name in _CACHES]
    lists = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    paging = [given(name, Type.i32, -1) for name in lists]
    longest = given("max_context_len", Type.i32)
    left_out = {
        "sliding_window": constant(0),
        "alibi_slopes": constant([], np.float32),
        "max_context_len": longest,
        "score_aggregation_window": constant([]),
        "rotated_block_indices": constant([]),
        "rotation_deltas": constant([]),
        "rotation_trig_lut": constant([], np.float32),
        "xattention_threshold": constant([], np.float32),
        "xattention_block_size": constant(64),
        "xattention_stride": constant(8),
        "sinks": constant(np.zeros((0, 0, 0, 0)), np.float32),
        "adaptive_rkv_start_size": constant(0),
        "adaptive_rkv_evictable_sizes": constant([]),
        "adaptive_rkv_diversity_block_set_indices": constant([]),
        "adaptive_rkv_diversity_block_set_indices_begins": constant([]),
        "token_type_ids": constant([]),
        "qq_bias": constant([], np.uint8),
        "qq_bias_begins": constant([]),
    }
    scale = constant(shape.head_size**-0.5, np.float32)
    inputs = [*packed, *caches, *paging, scale, *left_out.values()]
    node = _PagedAttentionExtension([node.output(0) for node in inputs])
    about = node.get_rt_info()
    for letter in "kv":
        about[f"{letter}_head_size"] = shape.head_size
        about[f"num_{letter}_heads"] = shape.kv_heads
    return openvino.Model([node.output(0)], [*packed, *caches, *paging, longest], "attention")


def _caches(compiled: openvino.CompiledModel, blocks: int, precision: str) -> list[Array]:
    """Zeros in numpy's memory, which has huge pages as our caches have."""
    caches = []
    for name in _CACHES:
        block = [size.get_length() for size in list(compiled.input(name).get_partial_shape())[1:]]  # u8: with scales
        caches.append(np.zeros((blocks, *block), _NUMPY[precision]))
    return caches


class _Step:
    """An inference request with its buffers."""

    def __init__(self, compiled: openvino.CompiledModel, caches: list[Array]) -> None:
        self.caches = caches
        self._request = compiled.create_infer_request()
        self._arrays: dict[str, Array] = dict(zip(_CACHES, caches, strict=True))
        for name, array in self._arrays.items():
            self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))

    def bind(self, packed: list[Array], past: list[int], table: Array) -> None:
        """Query, key and value of the step; tokens before it; a row of blocks per sequence."""
        new = len(packed[0]) // len(past)
        blocks = np.arange(len(past) + 1) * table.shape[1]
        numbers = {
            "past_lens": past,
            "subsequence_begins": np.arange(len(past) + 1) * new,
            "block_indices_begins": blocks,
            "max_context_len": max(past) + new,
        }
        self._arrays |= dict(zip(_PACKED, packed, strict=True))
        self._arrays |= {name: np.asarray(value, np.int32) for name, value in numbers.items()}
        self.bind_table(table)
        for name, array in self._arrays.items():
            if name not in _CACHES:
                self._request.set_tensor(name, openvino.Tensor(array, shared_memory=array.ndim > 0))

    def bind_table(self, table: Array) -> None:
        """Another row of blocks per sequence."""
        self._arrays["block_indices"] = table.reshape(-1).astype(np.int32)
        self._request.set_tensor("block_indices", openvino.Tensor(self._arrays["block_indices"], shared_memory=True))

    def run(self) -> None:
        """Runs once; `infer` would copy the output besides."""
        self._request.start_async()
        self._request.wait()

    def output(self) -> Array:
        """The last run's output, copied."""
        return np.array(self._request.get_output_tensor(0).data)

    def fill(self, shape: Shape) -> None:
        """Lets it write one block in the form that it wants, and copies that to all the others."""
        self.bind(_drawn(replace(shape, sequences=1, past=0, new=_BLOCK)), [0], np.zeros((1, 1), np.int32))
        self.run()
        for cache in self.caches:
            cache[1:] = cache[0]


def _check(compiled: openvino.CompiledModel, shape: Shape, precision: str, tolerance: float) -> None:
    """Its prompts, then its next tokens, against our op's, both with blocks in shuffled order."""
    table = shuffled_tables(shape, 1)[0]
    theirs = _Step(compiled, _caches(compiled, table.size, precision))
    dims = (table.size, _BLOCK, shape.kv_heads, shape.head_size)
    ours = {name: np.zeros(dims, np.float32) for name in _CACHES}
    for step in (replace(shape, past=0, new=shape.past), shape):
        packed = _drawn(step)
        theirs.bind(packed, [step.past] * step.sequences, table)
        theirs.run()
        right = paged_output(step, dict(zip(_PACKED, packed, strict=True)), ours)
        worst = float(np.abs(theirs.output() - right).max())
        if not worst <= tolerance:
            raise RuntimeError(
                f"OpenVINO's attention with {precision} caches is {worst:.1e} away from ours behind {step.past} "
                f"tokens, more than {tolerance:.0e}: one of both is wrong, and there is nothing to compare"
            )
