"""Writes a Llama of any size in float16 with random weights in an external data file, one piece of weights at a time.

    python tests/model/large_source.py FOLDER [--layers 32] [--hidden 4096] [--intermediate 11008] [--vocab 32000]

The defaults are those of a 7B model: 13.5 GB. The graph is the one that the demo's exporter spells out, changed to
float16 the way exporters do it: rotary angles stay float32 and are cast.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from pagegraft.runtime.demo.gguf_model import LlamaShape
from pagegraft.runtime.demo.llama_graph import ExternalTensor, build_decoder

DATA = "model.onnx.data"
SHAPE_7B = LlamaShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_heads=32,
    num_kv_heads=32,
    head_size=128,
    vocab_size=32000,
    context_length=4096,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
)
_PIECE = 1 << 22  # weights drawn at a time


def write_large(folder: Path, shape: LlamaShape = SHAPE_7B) -> int:
    """Writes graph, data and configuration into a new folder; the number of bytes of data."""
    folder.mkdir(parents=True)
    places = _places(shape)
    onnx.save(_in_half(build_decoder(shape, places)), folder / "model.onnx")
    config = {"model_type": "llama", "max_position_embeddings": shape.context_length, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**asdict(shape), **config}))
    rng = np.random.default_rng(0)
    with open(folder / DATA, "wb") as file:
        for name, place in places.items():
            # Norms are near one; projections keep the size of what passes them.
            base, spread = (1.0, 0.1) if len(place.shape) == 1 else (0.0, place.shape[0] ** -0.5)
            if name.endswith("embed_tokens.weight"):
                spread = 1.0
            for start in range(0, place.length // 2, _PIECE):
                count = min(_PIECE, place.length // 2 - start)
                file.write((base + spread * rng.standard_normal(count, np.float32)).astype(np.float16).data)
    return (folder / DATA).stat().st_size


def _places(shape: LlamaShape) -> dict[str, ExternalTensor]:
    width, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_size
    kv = shape.num_kv_heads * shape.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, width)}
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.self_attn.q_proj.weight": (width, heads),
            f"{at}.self_attn.k_proj.weight": (width, kv),
            f"{at}.self_attn.v_proj.weight": (width, kv),
            f"{at}.self_attn.o_proj.weight": (heads, width),
            f"{at}.post_attention_layernorm.weight": (width,),
            f"{at}.mlp.gate_proj.weight": (width, inner),
            f"{at}.mlp.up_proj.weight": (width, inner),
            f"{at}.mlp.down_proj.weight": (inner, width),
        }
    shapes["model.norm.weight"] = (width,)
    if not shape.tied_embeddings:
        shapes["lm_head.weight"] = (shape.vocab_size, width)
    places, offset = {}, 0
    for name, dims in shapes.items():
        length = 2 * int(np.prod(dims))
        places[name] = ExternalTensor(location=DATA, offset=offset, length=length, shape=dims)
        offset += length
    return places


def _in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or "inverse_frequencies" in tensor.name:
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.data_type = TensorProto.FLOAT16
        else:
            array = np.clip(numpy_helper.to_array(tensor), -65504, 65504).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    nodes = list(graph.node)
    for index in reversed(range(len(nodes))):
        node = nodes[index]
        if node.op_type in ("Cos", "Sin"):
            result = node.output[0]
            node.output[0] = f"{result}/float32"
            name = f"{node.name}/half"
            cast = helper.make_node("Cast", [node.output[0]], [result], name=name, to=TensorProto.FLOAT16)
            nodes.insert(index + 1, cast)
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def main() -> None:
    """Writes the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE_7B.num_layers)
    parser.add_argument("--hidden", type=int, default=SHAPE_7B.hidden_size, help="a multiple of 128")
    parser.add_argument("--intermediate", type=int, default=SHAPE_7B.intermediate_size)
    parser.add_argument("--vocab", type=int, default=SHAPE_7B.vocab_size)
    given = parser.parse_args()
    heads = given.hidden // SHAPE_7B.head_size
    shape = replace(
        SHAPE_7B,
        num_layers=given.layers,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=given.vocab,
    )
    size = write_large(given.folder, shape)
    print(f"{given.folder}: {size / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
