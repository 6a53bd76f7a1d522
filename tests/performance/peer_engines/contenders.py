"""Who takes part: the engine, the form of the model, and the settings, with what the table says about them.

Settings follow each project's advice for throughput on CPU: as many threads as cores, caches that hold every request,
batches as large as the engine takes. Where two settings were about equally advisable, both were tried and the faster
is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONTENDERS", "Contender"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """engine: the module `<engine>_engine.py`. environment: folder of its Python; "" is the one that runs this.
    model: its name in the folder of models. precise: computes in float32 with float32 caches, so that outputs
    should equal pagegraft's until two tokens are about equally likely."""

    name: str
    title: str
    engine: str
    environment: str
    model: str
    weights: str
    cache: str
    precise: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


_OPENVINO_SCHEDULER = {"cache_size": 2, "max_num_seqs": 128, "max_num_batched_tokens": 512}
_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_LLAMA = ["-np", "64", "-c", "40960", "--kv-unified", "-b", "2048", "-ub", "512", "--no-webui"]
_VLLM = {"kv_gib": 2, "max_num_seqs": 128, "max_model_len": 1024}

CONTENDERS = (
    Contender(
        name="pagegraft",
        title="pagegraft",
        engine="pagegraft",
        environment="",
        model="paged",
        weights="float32",
        cache="float32",
        precise=True,
        settings={"kv_memory": "2GiB"},
    ),
    Contender(
        name="openvino-f32",
        title="OpenVINO GenAI, continuous batching, float32",
        engine="openvino",
        environment="openvino",
        model="model-f16.gguf",
        weights="float16, computed in float32",
        cache="float32",
        precise=True,
        settings={"scheduler": _OPENVINO_SCHEDULER, "properties": _FLOAT32},
    ),
    Contender(
        name="openvino",
        title="OpenVINO GenAI, continuous batching, defaults",
        engine="openvino",
        environment="openvino",
        model="model-f16.gguf",
        weights="float16, computed in bfloat16",
        cache="int8",
        settings={"scheduler": _OPENVINO_SCHEDULER, "properties": {}},
    ),
    Contender(
        name="openvino-q4",
        title="OpenVINO GenAI, continuous batching, the GGUF file itself",
        engine="openvino",
        environment="openvino",
        model="source.gguf",
        weights="4 bits (Q4_1)",
        cache="int8",
        settings={"scheduler": _OPENVINO_SCHEDULER, "properties": {}},
    ),
    Contender(
        name="llama-f32",
        title="llama.cpp server, float32",
        engine="llama",
        environment="llama",
        model="model-f32.gguf",
        weights="float32",
        cache="float32",
        precise=True,
        settings={"arguments": [*_LLAMA, "-ctk", "f32", "-ctv", "f32"]},
    ),
    Contender(
        name="llama-bf16",
        title="llama.cpp server, bfloat16",
        engine="llama",
        environment="llama",
        model="model-bf16.gguf",
        weights="bfloat16",
        cache="float16",
        settings={"arguments": _LLAMA},
    ),
    Contender(
        name="llama-f16",
        title="llama.cpp server, float16",
        engine="llama",
        environment="llama",
        model="model-f16.gguf",
        weights="float16",
        cache="float16",
        settings={"arguments": _LLAMA},
    ),
    Contender(
        name="llama-q4",
        title="llama.cpp server, the GGUF file itself",
        engine="llama",
        environment="llama",
        model="source.gguf",
        weights="4 bits (Q4_1)",
        cache="float16",
        settings={"arguments": _LLAMA},
    ),
    Contender(
        name="vllm-f32",
        title="vLLM, float32",
        engine="vllm",
        environment="vllm",
        model="transformers",
        weights="float32",
        cache="float32",
        precise=True,
        settings={**_VLLM, "dtype": "float32"},
    ),
    Contender(
        name="vllm-bf16",
        title="vLLM, bfloat16",
        engine="vllm",
        environment="vllm",
        model="transformers",
        weights="bfloat16",
        cache="bfloat16",
        settings={**_VLLM, "dtype": "bfloat16"},
    ),
    Contender(
        name="genai",
        title="onnxruntime-genai, padded batches of 8 by output length",
        engine="ort_genai",
        environment="genai",
        model="genai-fp32",
        weights="float32",
        cache="float32",
        precise=True,
        settings={"batch": 8, "sort": True},
    ),
    Contender(
        name="genai-q4",
        title="onnxruntime-genai, its 4-bit model, padded batches of 8 by output length",
        engine="ort_genai",
        environment="genai",
        model="genai-int4",
        weights="4 bits (its model builder)",
        cache="float32",
        settings={"batch": 8, "sort": True},
    ),
    Contender(
        name="pagegraft-genai",
        title="pagegraft, onnxruntime-genai's float32 model",
        engine="pagegraft",
        environment="",
        model="paged-genai-fp32",
        weights="float32",
        cache="float32",
        precise=True,
        settings={"kv_memory": "2GiB"},
    ),
    Contender(
        name="pagegraft-genai-q4",
        title="pagegraft, onnxruntime-genai's 4-bit model",
        engine="pagegraft",
        environment="",
        model="paged-genai-int4",
        weights="4 bits (genai's model builder)",
        cache="float32",
        settings={"kv_memory": "2GiB"},
    ),
    Contender(
        name="static",
        title="the exported model, padded batches of 8, arrival order",
        engine="static",
        environment="",
        model="export",
        weights="float32",
        cache="float32",
        precise=True,
        settings={"batch": 8, "sort": False},
    ),
    Contender(
        name="static-sorted",
        title="the exported model, padded batches of 8 by length",
        engine="static",
        environment="",
        model="export",
        weights="float32",
        cache="float32",
        precise=True,
        settings={"batch": 8, "sort": True},
    ),
)
