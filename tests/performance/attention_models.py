"""Models of our op, bound to their buffers as the runtime binds them, for op_bench.py.

Each function returns a callable that runs one step. All hold the same work: `Shape.new` tokens of each sequence attend
to `Shape.past` cached ones and themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from pagegraft.custom_ops import register, spec

__all__ = [
    "Array",
    "Run",
    "Shape",
    "bound",
    "filled",
    "numbers",
    "paged",
    "paged_output",
    "paging",
    "shuffled_tables",
    "small_chain",
]

Run = Callable[[], None]
Array = np.ndarray[Any, Any]

_NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int4": np.dtype(np.uint8),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one step; every sequence has the same lengths."""

    sequences: int
    past: int
    new: int
    heads: int
    kv_heads: int
    head_size: int
    block_size: int

    def with_block(self, block_size: int) -> Shape:
        """The same work with another block size."""
        return replace(self, block_size=block_size)

    def with_past(self, past: int) -> Shape:
        """The same step at another context."""
        return replace(self, past=past)

    @property
    def total(self) -> int:
        """Tokens of one sequence after the step."""
        return self.past + self.new

    def kv_bytes(self, cache: str) -> int:
        """Bytes of keys and values that the step reads."""
        width = spec.cache_head_width(self.head_size, cache) * _NUMPY[cache].itemsize
        return 2 * self.sequences * self.total * self.kv_heads * width

    def copies(self, cache: str) -> int:
        """Caches of a type that take the memory of one of float32."""
        return round(self.kv_bytes("float32") / self.kv_bytes(cache))

    def useful_flops(self) -> int:
        """Operations of both products over what the causal mask leaves."""
        pairs = self.new * self.past + self.new * (self.new + 1) // 2
        return 4 * self.sequences * self.heads * self.head_size * pairs


def filled(shape: Sequence[int], dtype: np.dtype[Any]) -> ort.OrtValue:
    """An OrtValue with a repeated random pattern, in memory of numpy as the runtime's caches are (huge pages)."""
    pattern = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    if dtype.itemsize == 1:
        codes = (pattern * 20).clip(-100, 100)
        stored = codes.astype(dtype) if dtype != np.uint8 else codes.astype(np.int8).view(np.uint8)
    else:
        stored = pattern.astype(dtype)
    memory = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    for start in range(0, memory.size, stored.nbytes):
        part = memory[start : start + stored.nbytes]
        part[:] = stored.view(np.uint8)[: part.size]
    plain = dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")  # onnxruntime knows numpy's own types
    array = memory.view(plain).reshape(shape)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, helper.np_dtype_to_tensor_dtype(dtype))


def _session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _model(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, ort.OrtValue], outputs: Mapping[str, int]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info(n, v.element_type(), v.shape()) for n, v in inputs.items()],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()],
    )
    opsets = [
        helper.make_opsetid("", 23),
        *(helper.make_opsetid(d, 1) for d in ("com.microsoft", spec.PAGEGRAFT_DOMAIN)),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def bound(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, ort.OrtValue],
    outputs: Mapping[str, ort.OrtValue | int],
    threads: int,
    in_turn: Mapping[str, Sequence[ort.OrtValue]] | None = None,
) -> Run:
    """Binds once; an output given by its type alone is allocated by onnxruntime in each run.

    Inputs of `in_turn` take their values one a run, from the first again after the last.
    """
    types = {n: v if isinstance(v, int) else v.element_type() for n, v in outputs.items()}
    session = _session(_model(nodes, inputs, types), threads)
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, out in outputs.items():
        if isinstance(out, int):
            binding.bind_output(name, "cpu")
        else:
            binding.bind_ortvalue_output(name, out)

    turns = [(name, cycle(values)) for name, values in (in_turn or {}).items()]

    def run() -> None:
        for name, values in turns:
            binding.bind_ortvalue_input(name, next(values))
        session.run_with_iobinding(binding)

    run.__dict__["memory"] = (inputs, outputs, in_turn)  # a binding does not keep numpy's memory alive
    return run


def numbers(values: Any, dtype: Any = np.int32) -> ort.OrtValue:
    """An OrtValue of small integers or floats."""
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(values, dtype))


def _packed(shape: Shape) -> dict[str, ort.OrtValue]:
    tokens, width = shape.sequences * shape.new, shape.kv_heads * shape.head_size
    float32 = np.dtype(np.float32)
    return {
        "query": filled([tokens, shape.heads * shape.head_size], float32),
        "key": filled([tokens, width], float32),
        "value": filled([tokens, width], float32),
    }


def shuffled_tables(shape: Shape, copies: int) -> Array:
    """Block tables of `copies` separate caches [copies, sequences, blocks], in random order.

    Depends on nothing but the number of blocks.
    """
    width = -(-shape.total // shape.block_size)
    blocks = copies * shape.sequences * width
    return np.random.default_rng(1).permutation(blocks).reshape(copies, shape.sequences, width)


def paging(shape: Shape, table: Array) -> dict[str, ort.OrtValue]:
    """Lengths and the block table."""
    return {
        "cumulative_sequence_length": numbers(np.arange(shape.sequences + 1) * shape.new),
        "past_seqlens": numbers([shape.past] * shape.sequences),
        "block_table": numbers(table),
    }


def paged(shape: Shape, *, cache: str, threads: int, copies: int = 1) -> Run:
    """Our op with caches updated in place, blocks shuffled; int8 is PER_TOKEN, other codes PER_CHANNEL.

    Runs read `copies` caches in turn: without that a small one stays in a large last-level cache.
    """
    tables = shuffled_tables(shape, copies)
    inputs = {**_packed(shape), **paging(shape, tables[0])}
    blocks = tables.size
    dims = [blocks, shape.block_size, shape.kv_heads, spec.cache_head_width(shape.head_size, cache)]
    attributes: dict[str, Any] = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads}
    outputs: dict[str, ort.OrtValue | int] = {"output": filled(inputs["query"].shape(), np.dtype(np.float32))}
    for name in ("key_cache", "value_cache"):
        inputs[name] = filled(dims, _NUMPY[cache])
        outputs[f"{name}_out"] = inputs[name]
    if cache in spec.QUANTISED_CACHE_DTYPES:
        per_token = cache == "int8"
        scale_dims = [blocks, shape.kv_heads, shape.block_size] if per_token else [shape.kv_heads, 1, shape.head_size]
        for letter in "kv":
            attributes[f"{letter}_quant_type"] = "PER_TOKEN" if per_token else "PER_CHANNEL"
            attributes[f"{letter}_cache_dtype"] = cache
            scale = numbers(np.full(scale_dims, 0.02), np.float32)
            inputs[f"{letter}_scale"] = scale
            if per_token:
                outputs[f"{letter}_scale_out"] = scale
    in_turn = {"block_table": [numbers(table) for table in tables]}
    return bound([_paged_node(inputs, outputs, attributes)], inputs, outputs, threads, in_turn)


def paged_output(shape: Shape, packed: Mapping[str, Array], caches: Mapping[str, Array]) -> Array:
    """Our op's output on float32 `query`, `key` and `value` [tokens, heads * head size] of one step.

    `key_cache` and `value_cache` [blocks, block size, KV heads, head size] are updated in place.
    """
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in {**packed, **caches}.items()}
    inputs |= paging(shape, shuffled_tables(shape, 1)[0])
    output = np.empty_like(packed["query"])
    outputs: dict[str, ort.OrtValue | int] = {"output": ort.OrtValue.ortvalue_from_numpy(output)}
    outputs |= {f"{name}_out": inputs[name] for name in caches}
    attributes = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads}
    bound([_paged_node(inputs, outputs, attributes)], inputs, outputs, threads=1)()
    return output


def _paged_node(
    inputs: Mapping[str, ort.OrtValue], outputs: Mapping[str, ort.OrtValue | int], attributes: Mapping[str, Any]
) -> onnx.NodeProto:
    by_index = {int(p.index): p.name for p in spec.OUTPUTS if p.name in outputs}
    return helper.make_node(
        spec.OP_TYPE,
        [p.name if p.name in inputs else "" for p in spec.INPUTS],
        [by_index.get(i, "") for i in range(max(by_index) + 1)],
        domain=spec.PAGEGRAFT_DOMAIN,
        **attributes,
    )


def small_chain(layers: int, *, threads: int) -> Run:
    """`layers` of our op in a row on one token of a tiny shape, the output of each the query of the next."""
    shape = Shape(sequences=1, past=30, new=1, heads=4, kv_heads=2, head_size=16, block_size=16)
    inputs = {**_packed(shape), **paging(shape, shuffled_tables(shape, 1)[0])}
    outputs: dict[str, ort.OrtValue | int] = {}
    nodes = []
    source = "query"
    for i in range(layers):
        caches = [f"key_{i}", f"value_{i}"]
        for name in caches:
            inputs[name] = filled([2, 16, 2, 16], np.dtype(np.float32))
            outputs[f"{name}_out"] = inputs[name]
        target = f"hidden_{i}"
        names = [source, "key", "value", *caches, "cumulative_sequence_length", "past_seqlens", "block_table"]
        nodes.append(
            helper.make_node(
                spec.OP_TYPE,
                names,
                [target, *(f"{name}_out" for name in caches)],
                domain=spec.PAGEGRAFT_DOMAIN,
                num_heads=4,
                kv_num_heads=2,
            )
        )
        source = target
    outputs[source] = filled([1, 64], np.dtype(np.float32))
    return bound(nodes, inputs, outputs, threads)
