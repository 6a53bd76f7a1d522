"""Exports of further architectures and of model code written by hand (make_exports.py): each converted model, packed
and ragged, equals its source; what no op can express is refused; faults put into them do not pass verification.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper
from pagegraft.custom_ops.manifest import MANIFEST_FILE, Manifest, file_digest
from pagegraft.graphpass import ConvertOptions, NotConvertible, Report, VerificationError, convert, verify
from pagegraft.graphpass.packed import PackedModel
from pagegraft.runtime import LLM, SamplingParams

SOURCES = Path(__file__).parents[1] / "data" / "exports"


@dataclass(frozen=True)
class Expected:
    """What is known of a source from its torch code: heads, head sizes, and each layer's window."""

    kv_heads: int | tuple[int, int]
    key_size: int
    value_size: int
    windows: tuple[int | None, int | None] = (None, None)
    alibi: bool = False
    latent: bool = False


#: A latent of 16 channels and a rotated key of 8, one for all heads.
LATENT = Expected(1, 24, 16, latent=True)
MODELS = {
    "sequence_first_interleaved__old": Expected(2, 8, 8),
    "sequence_first_half__old": Expected(2, 8, 8),
    "interleaved_pack__old": Expected(2, 8, 8),
    "transposed_keys__old": Expected(2, 8, 8),
    "rotated_after_cache__old": Expected(4, 8, 8),
    "shared_fused__old": Expected(1, 8, 8),
    "packed_alibi__old": Expected(4, 8, 8, alibi=True),
    "biogpt__ts": Expected(4, 8, 8),
    "exaone4__ts": Expected(2, 8, 8, windows=(12, None)),
    "hunyuan_v1_dense__ts": Expected(2, 8, 8),
    "mimo_v2_flash__ts": Expected((2, 4), 8, 8, windows=(None, 12)),
    "minicpm3__ts": Expected(4, 24, 16),
    "latent_two_caches__old": LATENT,
    "latent_two_caches__dyn": LATENT,
    "latent_einsum__dyn": LATENT,
    "latent_one_cache__old": LATENT,
    "rows_of_groups__old": Expected(2, 8, 8),
}
REFUSED = {
    "holes__old": ("mask", "holes"),
    "doge__ts": ("score", "from the tokens themselves"),
}
LENGTHS = (29, 1, 13, 40)
#: As fractions of the logits' standard deviation, and of what removing the context changes.
TOLERANCE, CONTEXT_FRACTION = 1e-4, 0.01


class Oracle:
    """A source in plain onnxruntime, one whole sequence from an empty past; shares no code with the graph pass."""

    def __init__(self, model: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(str(model), options)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """`[tokens, vocab]`."""
        count = len(tokens)
        feeds: dict[str, NDArray[np.generic]] = {}
        for node in self.session.get_inputs():
            if node.name == "input_ids":
                feeds[node.name] = np.array([tokens], np.int64)
            elif node.name == "attention_mask":
                feeds[node.name] = np.ones((1, count), np.int64)
            elif node.name == "position_ids":
                feeds[node.name] = np.arange(count, dtype=np.int64)[None]
            else:
                named = {"batch": 1, "past": 0}  # dynamo has names of its own: the batch comes first then
                dims = [named.get(d, int(i == 0)) if isinstance(d, str) else d for i, d in enumerate(node.shape)]
                feeds[node.name] = np.zeros(dims, np.float32)
        return np.asarray(self.session.run(["logits"], feeds)[0][0], np.float64)


@dataclass(frozen=True)
class Converted:
    """A model beside its source."""

    name: str
    source: Path
    folder: Path
    report: Report


@pytest.fixture(scope="module", params=list(MODELS))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    source, folder = SOURCES / request.param, tmp_path_factory.mktemp("exports") / "out"
    return Converted(request.param, source, folder, convert(source, folder))


def ragged(folder: Path, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """All logits of the sequences, which join one by one and advance by mixed numbers of tokens in shared steps."""
    model = PackedModel(folder / "model.onnx", Manifest.load(folder), num_blocks=48, block_size=4)
    rng = np.random.default_rng(17)
    done, parts = [0] * len(sequences), [[] for _ in sequences]  # type: ignore[var-annotated]
    joined = 0
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        joined = min(joined + 1, len(sequences))
        counts = {i: min(int(rng.integers(1, 9)), len(sequences[i]) - done[i]) for i in rng.permutation(joined)}
        work = [(int(i), sequences[i][done[i] : done[i] + n]) for i, n in counts.items() if n > 0]
        if not work:
            continue
        for (index, tokens), logits in zip(work, model.step(work), strict=True):
            parts[index].append(logits)
            done[index] += len(tokens)
    return [np.concatenate(p).astype(np.float64) for p in parts]


def test_ragged_batch_equals_source(converted: Converted) -> None:
    oracle = Oracle(converted.source / "model.onnx")
    rng = np.random.default_rng(2)
    sequences = [rng.integers(3, 128, n).tolist() for n in LENGTHS]
    wanted = [oracle.logits(s) for s in sequences]
    alone = np.concatenate([oracle.logits([t]) for s in sequences for t in s])
    gap = np.abs(np.concatenate(ragged(converted.folder, sequences)) - np.concatenate(wanted))
    deviation = np.concatenate(wanted).std()
    assert np.isfinite(gap).all()
    assert gap.max() <= TOLERANCE * deviation
    effect = np.sqrt(np.mean((alone - np.concatenate(wanted)) ** 2))
    assert effect > 0.05 * deviation  # the context matters: an attention that is wrong would show
    assert gap.max() <= CONTEXT_FRACTION * effect


def test_recognised_as_the_code_says(converted: Converted) -> None:
    expected = MODELS[converted.name]
    layers = converted.report.layers
    assert {layer.heads for layer in layers} == {4}
    groups = expected.kv_heads if isinstance(expected.kv_heads, tuple) else (expected.kv_heads,) * 2
    assert tuple(layer.kv_heads for layer in layers) == groups
    assert {layer.key_head_size for layer in layers} == {expected.key_size}
    assert {layer.value_head_size for layer in layers} == {expected.value_size}
    assert tuple(layer.window for layer in layers) == expected.windows
    assert {bool(layer.alibi_slopes) for layer in layers} == {expected.alibi}
    assert {layer.latent for layer in layers} == {expected.latent}


def test_a_latent_attention_keeps_one_cache(tmp_path: Path) -> None:
    """Two caches of the source, or one, become one of the op, whose first channels are the values."""
    for name in ("latent_two_caches__old", "latent_one_cache__old"):
        report = convert(SOURCES / name, tmp_path / name)
        model = onnx.load(tmp_path / name / "model.onnx")
        caches = [i for i in model.graph.input if i.name.startswith("past_key_values")]
        assert [c.name for c in caches] == ["past_key_values.0.key", "past_key_values.1.key"]
        assert [d.dim_value for d in caches[0].type.tensor_type.shape.dim][2:] == [1, 24]
        nodes = [n for n in model.graph.node if n.op_type == "PagedAttention"]
        for node in nodes:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            assert (node.domain, attributes["kv_cache_layout"], attributes["v_head_size"]) == (
                "pagegraft",
                b"LATENT",
                16,
            )
            assert len(node.output) == 2
            if name == "latent_two_caches__old":  # the part behind the latent is rotated in the op
                assert (attributes["do_rotary"], attributes["rotary_offset"]) == (1, 16)
        assert {layer.value_head_size for layer in Manifest.load(tmp_path / name).layers} == {None}
        assert report.kv_bytes_per_token == 2 * 24 * 4


def test_the_engine_decodes_a_latent_model_as_its_source(tmp_path: Path) -> None:
    """Greedy tokens of ragged prompts in a pool so small that sequences are preempted."""
    convert(SOURCES / "latent_two_caches__dyn", tmp_path / "out")
    oracle = Oracle(SOURCES / "latent_two_caches__dyn" / "model.onnx")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 128, n).tolist() for n in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(tmp_path / "out", num_blocks=4, block_size=16, max_num_batched_tokens=16, num_threads=1) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = oracle.logits([*prompt, *tokens])
        assert list(tokens) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_sum_of_products_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    """The first product of two passes a Tanh before the second is added."""
    model = onnx.load(SOURCES / "latent_two_caches__old" / "model.onnx")
    nodes = list(model.graph.node)
    (softmax, *_) = [n for n in nodes if n.op_type == "Softmax"]
    producer = {out: n for n in nodes for out in n.output}
    total = producer[producer[softmax.input[0]].input[0]]
    assert total.op_type == "Add"
    first = producer[total.input[0]]
    assert first.op_type == "MatMul"
    model.graph.node.insert(nodes.index(total), helper.make_node("Tanh", [total.input[0]], ["bent"]))
    total.input[0] = "bent"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(NotConvertible, match="no weighted sum of the 2 products") as failure:
        convert(tmp_path / "model.onnx", tmp_path / "out")
    assert (failure.value.kind, failure.value.node) == ("score", softmax.name)
    assert failure.value.hint


def test_tables_of_the_source_limit_the_context(tmp_path: Path) -> None:
    """The table of ALiBi biases ends at 64 although config.json says 128."""
    convert(SOURCES / "packed_alibi__old", tmp_path / "out")
    assert Manifest.load(tmp_path / "out").max_positions == 64


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str, tmp_path: Path) -> None:
    kind, word = REFUSED[name]
    with pytest.raises(NotConvertible, match=word) as failure:
        convert(SOURCES / name, tmp_path / "out")
    assert failure.value.kind == kind
    assert failure.value.node
    assert not list(tmp_path.iterdir())


def test_probabilities_with_two_sets_of_values_are_refused(tmp_path: Path) -> None:
    """As differential attention has them; here the difference of two mixtures by the same probabilities."""
    model = onnx.load(SOURCES / "transposed_keys__old" / "model.onnx")
    nodes = model.graph.node
    (softmax, *_) = [n for n in nodes if n.op_type == "Softmax"]
    (mixing,) = [n for n in nodes if softmax.output[0] in n.input]
    place = list(nodes).index(mixing)
    mixed, mixing.output[0] = mixing.output[0], "mixed_first"
    nodes.insert(place + 1, helper.make_node("Tanh", [mixing.input[1]], ["second_values"]))
    nodes.insert(place + 2, helper.make_node("MatMul", [softmax.output[0], "second_values"], ["mixed_second"]))
    nodes.insert(place + 3, helper.make_node("Sub", ["mixed_first", "mixed_second"], [mixed]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(NotConvertible, match="2 sets of values") as failure:
        convert(tmp_path / "model.onnx", tmp_path / "out")
    assert (failure.value.kind, failure.value.node) == ("score", softmax.name)


# --- faults ----------------------------------------------------------------------------------------------------------

Fault = Callable[[onnx.NodeProto], None]


def attribute(name: str, change: Callable[[object], object]) -> Fault:
    """Changes an attribute of an attention."""

    def apply(node: onnx.NodeProto) -> None:
        (old,) = [a for a in node.attribute if a.name == name]
        value = change(helper.get_attribute_value(old))
        node.attribute.remove(old)
        node.attribute.append(helper.make_attribute(name, value))

    return apply


def other_rotary(node: onnx.NodeProto) -> None:
    """Pairs neighbours instead of halves, or the other way round."""
    old = [a for a in node.attribute if a.name == "rotary_interleaved"]
    value = old[0].i if old else 0
    for a in old:
        node.attribute.remove(a)
    node.attribute.append(helper.make_attribute("rotary_interleaved", 1 - value))


def no_rotary(node: onnx.NodeProto) -> None:
    attribute("do_rotary", lambda _: 0)(node)
    node.input[8] = node.input[9] = ""


FAULTS: dict[str, tuple[str, int, Fault]] = {
    "latent rotated where its value is": ("latent_einsum__dyn", 0, attribute("rotary_offset", lambda o: o - 8)),  # type: ignore[operator]
    "half for interleaved": ("sequence_first_interleaved__old", 0, other_rotary),
    "interleaved for half": ("sequence_first_half__old", 1, other_rotary),
    "no rotary": ("transposed_keys__old", 1, no_rotary),
    "scale a hundredth off": ("interleaved_pack__old", 0, attribute("scale", lambda s: 1.01 * s)),  # type: ignore[operator]
    "slopes negated": ("packed_alibi__old", 1, attribute("alibi_slopes", lambda v: [-x for x in v])),  # type: ignore[union-attr]
    "window one short": ("exaone4__ts", 0, attribute("local_window_size", lambda w: w - 1)),  # type: ignore[operator]
    "window one long": ("mimo_v2_flash__ts", 1, attribute("local_window_size", lambda w: w + 1)),  # type: ignore[operator]
    "window dropped": ("mimo_v2_flash__ts", 1, attribute("local_window_size", lambda _: -1)),
    "latent scale a hundredth off": ("latent_two_caches__dyn", 1, attribute("scale", lambda s: 1.01 * s)),  # type: ignore[operator]
    "q norm weight of k": ("hunyuan_v1_dense__ts", 0, lambda node: node.input.__setitem__(12, node.input[13])),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_do_not_pass_verification(fault: str, tmp_path: Path) -> None:
    name, layer, change = FAULTS[fault]
    out = tmp_path / "out"
    convert(SOURCES / name, out, ConvertOptions(verify=False))
    assert not Manifest.load(out).verification["verified"]
    verify(SOURCES / name, out)
    model = onnx.load(out / "model.onnx")
    change([n for n in model.graph.node if n.op_type == "PagedAttention"][layer])
    onnx.save(model, out / "model.onnx")
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    manifest["graph_digest"] = file_digest(out / "model.onnx")  # so that only the comparison can find the fault
    (out / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="does not compute"):
        verify(SOURCES / name, out)
