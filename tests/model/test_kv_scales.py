"""Static scales: calibration, their file, the com.microsoft form, and layers that share another layer's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from pagegraft import custom_ops
from pagegraft.custom_ops.manifest import CacheGroup, CacheLayer, Manifest
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.spec import AttentionAttributes
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.graphpass.calibrate import KvScales, calibrate
from pagegraft.graphpass.errors import KvCacheError
from pagegraft.graphpass.options import Target
from pagegraft.graphpass.rewrite.cache_dtype import CacheFormat, LayerScales, set_cache_format
from pagegraft.graphpass.rewrite.rotation import rotations
from plain_source import PlainSource
from tokenizers import Tokenizer, models, pre_tokenizers

DATA = Path(__file__).parents[1] / "data"
SOURCE = DATA / "zoo" / "llama_gqa__opt"
INT8 = CacheFormat(dtype="int8", quant="PER_CHANNEL")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion with float caches and a tokenizer of bytes, beside a text."""
    folder = tmp_path_factory.mktemp("floats")
    convert(SOURCE, folder / "model", ConvertOptions(verify=False))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    characters = np.random.default_rng(4).integers(32, 127, 900)
    (folder / "text.txt").write_text("".join(map(chr, characters)))
    return folder


@pytest.fixture(scope="module")
def scales(floats: Path) -> KvScales:
    return calibrate(floats / "model", floats / "text.txt", INT8)


def _constant_scales(folder: Path) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    graph = onnx.load(folder / "model.onnx").graph
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    nodes = [n for n in graph.node if n.op_type == "PagedAttention"]
    return [(constants[n.input[14]], constants[n.input[15]]) for n in nodes]


def test_the_file_gives_back_the_scales_and_the_graph_holds_them(
    floats: Path, scales: KvScales, tmp_path: Path
) -> None:
    scales.save(tmp_path / "scales.json")
    again = KvScales.load(tmp_path / "scales.json")
    assert again.form == INT8
    for saved, loaded in zip(scales.layers, again.layers, strict=True):
        assert np.array_equal(saved.key, loaded.key)
        assert np.array_equal(saved.value, loaded.value)
    options = ConvertOptions(kv_dtype="int8", kv_scales=tmp_path / "scales.json", verify=False)
    convert(SOURCE, tmp_path / "out", options)
    for layer, (key, value) in zip(scales.layers, _constant_scales(tmp_path / "out"), strict=True):
        assert key.shape == (2, 1, 16)
        assert np.array_equal(key, layer.key)
        assert np.array_equal(value, layer.value)
    assert {layer.quant for layer in Manifest.load(tmp_path / "out").layers} == {"PER_CHANNEL"}


def test_scales_cover_keys_at_every_position(floats: Path, scales: KvScales) -> None:
    """Turning a pair of channels, as rotary embedding does with distance, must not take a key out of the codes."""
    manifest = Manifest.load(floats / "model")
    rotation = rotations(ir.load(floats / "model" / "model.onnx"), manifest)[0]
    assert rotation is not None
    session = onnxruntime.InferenceSession(str(SOURCE / "model.onnx"))
    text = (floats / "text.txt").read_text()
    tokens = Tokenizer.from_file(str(floats / "model" / "tokenizer.json")).encode(text).ids[:256]
    feeds = {i.name: PlainSource(SOURCE / "model.onnx")._feed(i, tokens) for i in session.get_inputs()}
    key_HTD = session.run(["present.0.key"], feeds)[0][0].astype(np.float64)
    outside = []
    for target in range(0, 256, 5):
        moved = rotation.move(key_HTD.transpose(1, 0, 2), np.arange(256), np.full(256, target))
        outside.append(np.abs(moved) > 127.5 * scales.layers[0].key[:, 0, :])
    assert np.mean(outside) < 1e-3
    # The rotation is the model's own: one token alone at each of two positions differs by just that.
    alone = [session.run(["present.0.key"], _one_token(session, 7, position))[0][0, :, 0] for position in (3, 90)]
    turned = rotation.move(alone[0][None].astype(np.float64), np.array([3]), np.array([90]))[0]
    np.testing.assert_allclose(turned, alone[1], atol=1e-5)


def _one_token(session: onnxruntime.InferenceSession, token: int, position: int) -> dict[str, NDArray[np.generic]]:
    feeds = {i.name: PlainSource(SOURCE / "model.onnx")._feed(i, [token]) for i in session.get_inputs()}
    assert "position_ids" in feeds
    return {**feeds, "position_ids": np.array([[position]], np.int64)}


def test_scales_of_another_model_are_refused(scales: KvScales, tmp_path: Path) -> None:
    scales.save(tmp_path / "scales.json")
    options = ConvertOptions(kv_dtype="int8", kv_scales=tmp_path / "scales.json", verify=False)
    with pytest.raises(KvCacheError, match="another source model"):
        convert(DATA / "zoo" / "qwen2__opt", tmp_path / "out", options)
    assert [p.name for p in tmp_path.iterdir()] == ["scales.json"]


def test_scales_for_another_cache_type_are_refused(scales: KvScales, tmp_path: Path) -> None:
    scales.save(tmp_path / "scales.json")
    with pytest.raises(KvCacheError, match="calibrate for that"):
        convert(SOURCE, tmp_path / "out", ConvertOptions(kv_dtype="fp8", kv_scales=tmp_path / "scales.json"))


def test_a_file_that_cannot_be_written_is_one_sentence(scales: KvScales, tmp_path: Path) -> None:
    with pytest.raises(KvCacheError, match="cannot be written"):
        scales.save(tmp_path / "absent" / "scales.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(KvCacheError, match="cannot be written"):
        scales.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "pagegraft-kv-scales", "version": 1}', "\u00e4"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "scales.json").write_text(content, encoding="latin-1")
    with pytest.raises(KvCacheError, match="pagegraft calibrate"):
        KvScales.load(tmp_path / "scales.json")


def test_what_cannot_be_calibrated_says_so(floats: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(KvCacheError, match="different tokens"):
        calibrate(floats / "model", tmp_path / "short.txt", INT8)
    with pytest.raises(KvCacheError, match="cannot be read as text"):
        calibrate(floats / "model", tmp_path / "absent.txt", INT8)
    with pytest.raises(KvCacheError, match="needs no calibration"):
        calibrate(floats / "model", floats / "text.txt", CacheFormat(dtype="int8", quant="PER_TOKEN"))
    convert(SOURCE, tmp_path / "int8", ConvertOptions(kv_dtype="int8", verify=False))
    with pytest.raises(KvCacheError, match="quantised caches"):
        calibrate(tmp_path / "int8", floats / "text.txt", INT8)


def test_scales_of_the_wrong_shape_or_value_are_refused(floats: Path, scales: KvScales) -> None:
    manifest = Manifest.load(floats / "model")
    first = scales.layers[0]
    negative = replace(first, value=-first.value)
    for wrong, part in (
        ([first], "1 layers"),
        ([replace(first, key=first.key[:1]), first], "key scales of layer 0"),
        ([first, negative], "value scales of layer 1"),
    ):
        with pytest.raises(KvCacheError, match=part):
            set_cache_format(ir.load(floats / "model" / "model.onnx"), manifest, INT8, wrong)


@pytest.mark.parametrize(("kv_dtype", "kv_quant"), [("int8", "per-channel"), ("int8", "per-tensor"), ("fp8", None)])
def test_a_half_model_with_static_scales_is_a_stock_model(tmp_path: Path, kv_dtype: str, kv_quant: str | None) -> None:
    """onnxruntime without our library knows the op and its types; what it lacks on CPU is only the kernel."""
    source = DATA / "half" / "llama_gqa__optf16"
    report = convert(source, tmp_path / "out", ConvertOptions(kv_dtype=kv_dtype, kv_quant=kv_quant))
    assert report.verification["kv_cache"]["accuracy"]["greedy_agreement"] > 0.9
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert {n.domain for n in model.graph.node if n.op_type == "PagedAttention"} == {"com.microsoft"}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED .* Could not find an implementation for PagedAttention\(1\)"):
        onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), options)


@pytest.mark.parametrize(("target", "kv_dtype"), [("ascend", "fp8"), ("ort-cuda", "float32")])
def test_a_target_without_the_cache_type_is_named(tmp_path: Path, target: Target, kv_dtype: str) -> None:
    options = ConvertOptions(kv_dtype=kv_dtype, target=target, verify=False)
    with pytest.raises(KvCacheError, match="kernel stores float16"):
        convert(DATA / "half" / "llama_gqa__optf16", tmp_path / "out", options)
    assert not list(tmp_path.iterdir())


def test_int8_for_a_stock_runtime_is_per_channel(tmp_path: Path) -> None:
    options = ConvertOptions(kv_dtype="int8", target="ort-cuda", verify=False)
    convert(DATA / "half" / "llama_gqa__optf16", tmp_path / "out", options)
    assert {layer.quant for layer in Manifest.load(tmp_path / "out").layers} == {"PER_CHANNEL"}
    nodes = [n for n in onnx.load(tmp_path / "out" / "model.onnx").graph.node if n.op_type == "PagedAttention"]
    assert {n.domain for n in nodes} == {"com.microsoft"}


def test_a_layer_that_reads_anothers_cache_reads_its_scales(tmp_path: Path) -> None:
    """Two nodes, the second on the first one's caches with nothing written: equal to the float64 reference."""
    model, manifest = _shared_cache_model()
    changed = set_cache_format(model, manifest, CacheFormat(dtype="int8", quant="PER_TOKEN"))
    assert [layer.quant for layer in changed.layers] == ["PER_TOKEN"]
    names = {value.name for value in model.graph.inputs}
    assert {"past_key_values.0.key_scale", "past_key_values.0.value_scale"} <= names
    assert len(names) == 14
    ir.save(model, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    custom_ops.register(options)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options)
    rng = np.random.default_rng(0)
    feeds: dict[str, NDArray[np.generic]] = {
        name: rng.standard_normal((5, 16), np.float32) for name in ("q0", "k0", "v0", "q1", "k1", "v1")
    }
    feeds |= {
        "past_key_values.0.key": np.full((2, 8, 2, 8), -128, np.int8),
        "past_key_values.0.value": np.full((2, 8, 2, 8), -128, np.int8),
        "past_key_values.0.key_scale": np.full((2, 2, 8), np.nan, np.float32),
        "past_key_values.0.value_scale": np.full((2, 2, 8), np.nan, np.float32),
        "cumulative": np.array([0, 5], np.int32),
        "past": np.array([0], np.int32),
        "table": np.array([[1]], np.int32),
        "nowhere": np.full(5, -1, np.int32),
    }
    second = session.run(["out1"], feeds)[0]
    common = {
        "cumulative_sequence_length": feeds["cumulative"],
        "past_seqlens": feeds["past"],
        "block_table": feeds["table"],
    }
    attributes = AttentionAttributes(num_heads=2, kv_num_heads=2, k_quant_type="PER_TOKEN", v_quant_type="PER_TOKEN")
    caches = {
        "key_cache": feeds["past_key_values.0.key"],
        "value_cache": feeds["past_key_values.0.value"],
        "k_scale": feeds["past_key_values.0.key_scale"],
        "v_scale": feeds["past_key_values.0.value_scale"],
    }
    first = paged_attention(
        {"query": feeds["q0"], "key": feeds["k0"], "value": feeds["v0"], **caches, **common}, attributes
    )
    written = {name: first[f"{name}_out"] for name in caches}
    packed = {"query": feeds["q1"], "key": feeds["k1"], "value": feeds["v1"], "slot_mapping": feeds["nowhere"]}
    right = paged_attention({**packed, **written, **common}, attributes)["output"]
    np.testing.assert_allclose(second, right, atol=2e-3)
    assert np.abs(right).max() > 0.1


def _shared_cache_model() -> tuple[ir.Model, Manifest]:
    def tensor(name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    cache: list[int | str] = ["num_blocks", "block_size", 2, 8]
    pasts, presents = ["past_key_values.0.key", "past_key_values.0.value"], ["present.0.key", "present.0.value"]
    heads = {"num_heads": 2, "kv_num_heads": 2}
    lengths = ["cumulative", "past", "table"]
    nodes = [
        helper.make_node(
            "PagedAttention", ["q0", "k0", "v0", *pasts, *lengths], ["out0", *presents], domain="pagegraft", **heads
        ),
        helper.make_node(
            "PagedAttention",
            ["q1", "k1", "v1", *presents, *lengths, "", "", "nowhere"],
            ["out1"],
            domain="pagegraft",
            **heads,
        ),
    ]
    inputs = [tensor(name, ["tokens", 16]) for name in ("q0", "k0", "v0", "q1", "k1", "v1")]
    inputs += [tensor(name, cache) for name in pasts]
    sizes = {"cumulative": "c", "past": "s", "nowhere": "tokens"}
    inputs += [tensor(name, [size], TensorProto.INT32) for name, size in sizes.items()]
    inputs.append(tensor("table", ["s", "m"], TensorProto.INT32))
    outputs = [tensor("out0", ["tokens", 16]), tensor("out1", ["tokens", 16])]
    outputs += [tensor(name, cache) for name in presents]
    graph = helper.make_graph(nodes, "shared", inputs, outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("pagegraft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    layer = CacheLayer(
        group=0, kv_heads=2, key_head_size=8, value_head_size=8, key_dtype="float32", value_dtype="float32"
    )
    manifest = Manifest(
        model_file="model.onnx",
        graph_digest="",
        groups=(CacheGroup(window=None, layers=(0,), block_table="table", slot_mapping="nowhere"),),
        layers=(layer,),
        positions="none",
        vocab_size=1,
        compute_dtype="float32",
    )
    return ir.serde.deserialize_model(proto), manifest


def test_layer_scales_name_their_parts() -> None:
    scales = LayerScales(key=np.ones(1, np.float32), value=None)
    assert scales.part("key") is scales.key
    assert scales.part("value") is None
