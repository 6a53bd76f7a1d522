"""Every cache type: converted, run through the engine, within its bound of the source model in plain onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.graphpass import ConvertOptions, convert
from pagegraft.graphpass.errors import KvCacheError
from pagegraft.graphpass.kv_cache import form_of, kv_bytes_per_token
from pagegraft.graphpass.packed import PackedModel
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.plan import BlockCopy
from pagegraft.runtime.engine.request import RequestInput
from pagegraft.runtime.model.kv_pool import KVLayout, KVPool
from pagegraft.runtime.model.runner import KVGroup
from pagegraft.runtime.outputs import RequestOutput
from plain_source import PlainSource, log_softmax

SOURCES = Path(__file__).parents[1] / "data" / "zoo"
#: A plain one, one with two cache groups (full and a window) and a softcap, one with q/k norms taken into the op.
MODELS = ["llama_gqa__opt", "gemma2__dyn18", "qwen3__opt"]
#: Typical difference of log-probabilities as a fraction of what removing the context changes, at most and at least: a
#: cache that is nearer to the source than its type allows does not store what it says.
BOUNDS = {
    "float32": (0.0, 1e-5),
    "float16": (1e-5, 2e-3),
    "bfloat16": (2e-4, 1e-2),
    "int8": (5e-4, 3e-2),
    "fp8": (3e-3, 1e-1),
    "int4": (2e-2, 3.5e-1),
}
#: Bytes of a key or value head of 16 channels, with the scale of an int8 token.
HEAD_BYTES = {"float32": 64, "float16": 32, "bfloat16": 32, "int8": 16 + 4, "fp8": 16, "int4": 8}
INPUT_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int8": "tensor(int8)",
    "fp8": "tensor(float8e4m3fn)",
    "int4": "tensor(uint8)",
}
PROMPT_LENGTHS = (37, 1, 2, 21, 5, 13, 9, 34)
NEW_TOKENS = 6


@dataclass(frozen=True)
class Converted:
    """A source beside its conversions, made when first asked for."""

    source: Path
    scratch: Path

    def folder(self, kv_dtype: str | None, kv_quant: str | None = None) -> Path:
        out = self.scratch / f"{kv_dtype}-{kv_quant}"
        if not out.exists():
            convert(self.source, out, ConvertOptions(kv_dtype=kv_dtype, kv_quant=kv_quant, verify=False))
        return out


@pytest.fixture(scope="module", params=MODELS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(SOURCES / request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(SOURCES / "llama_gqa__opt", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(converted: Converted) -> tuple[list[list[int]], NDArray[np.float64], float]:
    """Prompts, the source's log-probabilities of all their tokens but the last, and the effect of the context."""
    source = PlainSource(converted.source / "model.onnx")
    vocab = source.logits([1]).shape[1]
    prompts = _prompts(vocab)
    expected = np.concatenate([log_softmax(source.logits(p)[:-1]) for p in prompts if len(p) > 1])
    tokens = [t for p in prompts for t in p[:-1]]
    alone = {t: log_softmax(source.logits([t])) for t in set(tokens)}
    effect = np.sqrt(np.mean((np.concatenate([alone[t] for t in tokens]) - expected) ** 2))
    return prompts, expected, float(effect)


def _prompts(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab, n + NEW_TOKENS).tolist() for n in PROMPT_LENGTHS]


def _run(folder: Path, prompts: list[list[int]]) -> list[RequestOutput]:
    """All prompts at once, in chunks, in a pool too small for them, each asked for all its log-probabilities."""
    with LLM(
        folder, num_blocks=9, block_size=16, max_num_batched_tokens=16, max_num_seqs=8, num_threads=1, debug=True
    ) as llm:
        vocab = llm.model.manifest.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=vocab)
        requests = []
        for index, prompt in enumerate(prompts):
            source = RequestInput(request_id=str(index), prompt_token_ids=prompt, params=params)
            requests.append(llm.engine.add(source))
            llm.engine.step()
        while llm.engine.has_work:
            llm.engine.step()
        return [request.output() for request in requests]


def _logprobs(outputs: list[RequestOutput], vocab: int) -> NDArray[np.float64]:
    """`[tokens, vocab]` of the prompts' tokens but each one's last."""
    entries = [entry for output in outputs for entry in output.prompt_logprobs[1:]]
    table = np.full((len(entries), vocab), np.nan)
    for row, entry in zip(table, entries, strict=True):
        row[entry.top_token_ids] = entry.top_logprobs
    return table


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_engine_is_within_the_bound_of_the_source(
    converted: Converted, wanted: tuple[list[list[int]], NDArray[np.float64], float], kv_dtype: str
) -> None:
    prompts, expected, effect = wanted
    folder = converted.folder(kv_dtype)
    actual = _logprobs(_run(folder, prompts), expected.shape[1])
    assert np.isfinite(actual).all()
    fraction = float(np.sqrt(np.mean((actual - expected) ** 2))) / effect
    least, most = BOUNDS[kv_dtype]
    assert least <= fraction <= most


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_caches_have_the_type_and_size_that_the_manifest_states(llama: Converted, kv_dtype: str) -> None:
    folder = llama.folder(kv_dtype)
    manifest = Manifest.load(folder)
    with LLM(folder, num_blocks=5, block_size=16, num_threads=1) as llm:
        inputs = {i.name: i for i in llm.engine.runner._session.get_inputs()}
        outputs = {o.name: o for o in llm.engine.runner._session.get_outputs()}
        assert llm.model.kv_bytes == llm.engine.runner.kv_bytes
        per_token = 2 * 2 * 2 * HEAD_BYTES[kv_dtype]  # layers, key and value, heads
        assert llm.model.kv_bytes == 5 * 16 * per_token
    assert kv_bytes_per_token(manifest) == per_token
    assert inputs["past_key_values.1.value"].type == INPUT_TYPES[kv_dtype]
    assert outputs["present.1.value"].type == INPUT_TYPES[kv_dtype]
    assert inputs["past_key_values.1.value"].shape[2:] == [2, 8 if kv_dtype == "int4" else 16]
    scales = {name for name in inputs if name.endswith("_scale")}
    assert len(scales) == (4 if kv_dtype == "int8" else 0)


@pytest.mark.parametrize(
    ("kv_dtype", "kv_quant"),
    [("int8", "per-token"), ("int8", "per-channel"), ("int8", "per-tensor"), ("fp8", "per-channel")],
)
def test_stored_codes_are_those_of_the_float_cache(llama: Converted, kv_dtype: str, kv_quant: str) -> None:
    """Layer 0 reads no cache before it writes: what it stores is the float conversion's, quantised."""
    tokens = np.random.default_rng(1).integers(3, 256, 70).tolist()
    stored, scales, floats = {}, {}, {}
    for form in (None, kv_dtype):
        folder = llama.folder(form, kv_quant if form else None)
        manifest = Manifest.load(folder)
        model = PackedModel(folder / manifest.model_file, manifest, num_blocks=9, block_size=8)
        model.step([(0, tokens[:50])])
        model.step([(0, tokens[50:])])
        for part in ("key", "value"):
            if form is None:
                floats[part] = model.stored(0, part, 0).astype(np.float64)
            else:
                stored[part] = model.stored(0, part, 0)
                scales[part] = _scales_of(folder, model, part)
    for part in ("key", "value"):
        if kv_quant == "per-token":
            top = np.abs(floats[part]).max(axis=2) / 127.0
            np.testing.assert_allclose(scales[part][..., 0], top, rtol=1e-5)
        codes = floats[part] / scales[part]
        if kv_dtype == "fp8":
            right = np.clip(codes, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            off = np.abs(stored[part].view(np.uint8).astype(int) - right.astype(int))
        else:
            off = np.abs(stored[part].astype(np.float64) - np.clip(np.rint(codes), -128, 127))
        assert off.max() <= 1
        assert (off > 0).mean() < 0.001
        assert np.unique(stored[part].view(np.uint8)).size > 100


def _scales_of(folder: Path, model: PackedModel, part: str) -> NDArray[np.float64]:
    """Scales of layer 0 that go with `[tokens, G, D]`: read from the cache, or from the graph's constants."""
    import onnx
    from onnx import numpy_helper

    name = f"past_key_values.0.{part}_scale"
    if name in model._caches:
        state, array = model._sequences[0], model._caches[name]
        position = np.arange(state.tokens)
        block = np.asarray(state.blocks[0])[position // model.block_size]
        return array[block, :, position % model.block_size].astype(np.float64)[..., None]
    graph = onnx.load(folder / "model.onnx").graph
    node = next(n for n in graph.node if n.op_type == "PagedAttention")
    constant = node.input[{"key": 14, "value": 15}[part]]
    scale = numpy_helper.to_array(next(i for i in graph.initializer if i.name == constant)).astype(np.float64)
    return scale if scale.ndim == 1 else scale[:, 0, :]


def test_forks_share_blocks_and_copy_scales_with_them(llama: Converted) -> None:
    """Three choices of one prompt that ends within a block: each must equal the choice that ran alone."""
    prompt = np.random.default_rng(2).integers(3, 256, 21).tolist()

    def params(n: int) -> SamplingParams:
        return SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)

    folder = llama.folder("int8")
    with LLM(folder, num_blocks=12, block_size=16, num_threads=1, debug=True) as llm:
        copies: list[BlockCopy] = []
        copy = llm.engine.runner.copy_blocks
        llm.engine.runner.copy_blocks = lambda pairs: (copies.extend(pairs), copy(pairs))[1]
        together = llm.generate([{"prompt_token_ids": prompt}], params(3))[0].outputs
    assert copies, "nothing was copied on write: this test would prove nothing"
    assert len({tuple(choice.token_ids) for choice in together}) > 1
    source = PlainSource(llama.source / "model.onnx")
    for choice in together:
        right = log_softmax(source.logits([*prompt, *choice.token_ids]))[len(prompt) - 1 : -1]
        wanted = right[np.arange(len(choice.token_ids)), list(choice.token_ids)]
        got = np.array([entry.logprob for entry in choice.logprobs])
        assert np.abs(got - wanted).max() < 0.1


def test_copying_a_block_copies_every_tensor_of_its_group(llama: Converted) -> None:
    manifest = Manifest.load(llama.folder("int8"))
    pool = KVPool(KVLayout(manifest, [KVGroup(num_blocks=4, block_size=8)]))
    arrays = pool._arrays[0]
    assert len(arrays) == 8  # two layers: keys, values and the scales of both
    for number, array in enumerate(arrays):
        array[...] = 0
        array[1] = number + 1
    pool.copy([BlockCopy(0, 1, 3)])
    for number, array in enumerate(arrays):
        assert (array[3] == number + 1).all()
        assert not array[[0, 2]].any()


def _running_at_once(folder: Path, kv_memory: int) -> int:
    """The most sequences of 48 tokens that one budget runs together, added one by one until one has to wait."""
    with LLM(folder, kv_memory=kv_memory, block_size=16, max_num_seqs=64, num_threads=1, debug=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        rng = np.random.default_rng(0)
        for index in range(64):
            prompt = rng.integers(3, 256, 32).tolist()
            llm.engine.add(RequestInput(request_id=str(index), prompt_token_ids=prompt, params=params))
        most = 0
        while llm.engine.has_work:
            llm.engine.step()
            most = max(most, len(llm.engine.scheduler.running))
        return most


def test_a_smaller_cache_runs_more_sequences(llama: Converted) -> None:
    budget = 12 * 16 * 512  # twelve blocks of the float cache
    plain, int8, int4 = (_running_at_once(llama.folder(t), budget) for t in ("float32", "int8", "int4"))
    assert int8 / plain >= 64 / 20 * 0.9
    assert int4 / plain >= 64 / 8 * 0.7


def test_conversion_verifies_twice_and_reports_the_accuracy(llama: Converted, tmp_path: Path) -> None:
    report = convert(llama.source, tmp_path / "out", ConvertOptions(kv_dtype="int8"))
    checked = Manifest.load(tmp_path / "out").verification
    assert checked == report.verification
    assert checked["difference"] < 1e-4, "the rewrite itself, with float caches"
    caches = checked["kv_cache"]
    assert (caches["dtype"], caches["quant"]) == ("int8", "PER_TOKEN")
    assert 5e-4 < caches["verification"]["context_fraction"] < 3e-2
    accuracy = caches["accuracy"]
    assert accuracy["tokens"] >= 1000
    assert 0.95 < accuracy["greedy_agreement"] <= 1.0
    assert 1e-4 < accuracy["logit_error_rms"] < 3e-2
    assert abs(accuracy["perplexity_change"]) < 5e-3
    assert report.kv_bytes_per_token == 160


def test_fp8_has_the_contracts_name_too() -> None:
    for quant in (None, "per-tensor"):
        assert form_of("float8e4m3fn", quant) == form_of("fp8", quant)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kv_dtype": "int7"}, "no cache type 'int7'"),
        ({"kv_dtype": "int4", "kv_quant": "per-token"}, "int8 caches only"),
        ({"kv_dtype": "float16", "kv_quant": "per-channel"}, "no scales"),
        ({"kv_quant": "per-channel"}, "add --kv-dtype"),
        ({"kv_dtype": "int8", "kv_quant": "per-head"}, "no scales 'per-head'"),
        ({"kv_dtype": "int8", "kv_quant": "per-token", "target": "ort-cuda"}, "target cpu only"),
    ],
)
def test_what_does_not_exist_is_refused_before_any_work(
    llama: Converted, tmp_path: Path, options: dict[str, str], part: str
) -> None:
    with pytest.raises(KvCacheError, match=part):
        convert(llama.source, tmp_path / "out", ConvertOptions(**options))
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_paged_already_keeps_its_caches(llama: Converted, tmp_path: Path) -> None:
    with pytest.raises(KvCacheError, match="paged already"):
        convert(llama.folder("float32"), tmp_path / "out", ConvertOptions(kv_dtype="int8"))
    assert not list(tmp_path.iterdir())
