"""Verification catches wrong conversions: each is injected into a right one, and the first wrong layer is named."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import decoder as d
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from pagegraft.custom_ops.manifest import MANIFEST_FILE, file_digest
from pagegraft.graphpass import ConvertOptions, NotConvertible, VerificationError, convert, verify
from pagegraft.graphpass.verify import Schedule, Verification, compare

OPTIONS = ConvertOptions(max_positions=128)
SLOPES = (0.5, 0.25, 0.125, 0.0625)
MODEL = d.Decoder(visible=d.window(6), scores=d.alibi(SLOPES), rotate=d.rotary, learned_positions=True, layers=3)
CAPPED = d.Decoder(scores=d.softcap(0.5), layers=3)

Change = Callable[[onnx.GraphProto], None]


def attention(graph: onnx.GraphProto, layer: int) -> onnx.NodeProto:
    return [n for n in graph.node if n.op_type == "PagedAttention"][layer]


def attribute(layer: int, name: str, change: Callable[[object], object]) -> Change:
    def apply(graph: onnx.GraphProto) -> None:
        node = attention(graph, layer)
        (old,) = [a for a in node.attribute if a.name == name]
        node.attribute.remove(old)
        node.attribute.append(helper.make_attribute(name, change(helper.get_attribute_value(old))))

    return apply


def shifted_positions(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == "position_ids":
                node.input[index] = "shifted"
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    graph.node.insert(0, helper.make_node("Add", ["position_ids", "one"], ["shifted"]))


def shifted_table(graph: onnx.GraphProto) -> None:
    name = attention(graph, 0).input[8]
    (tensor,) = [t for t in graph.initializer if t.name == name]
    tensor.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(tensor), 1, axis=0), name))


def late_rows_of_the_table(graph: onnx.GraphProto) -> None:
    """Right up to position 79."""
    name = attention(graph, 0).input[8]
    (tensor,) = [t for t in graph.initializer if t.name == name]
    table = numpy_helper.to_array(tensor).copy()
    table[80:] = table[79]
    tensor.CopyFrom(numpy_helper.from_array(table, name))


def swapped_caches(graph: onnx.GraphProto) -> None:
    """Layer 2 reads the keys of layer 1."""
    attention(graph, 2).input[3] = attention(graph, 1).input[3]


def swapped_key_and_value(graph: onnx.GraphProto) -> None:
    node = attention(graph, 1)
    node.input[1], node.input[2] = node.input[2], node.input[1]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    made = {}
    for name, model in (("full", MODEL), ("capped", CAPPED)):
        folder = tmp_path_factory.mktemp(name)
        source = model.save(folder / "source")
        convert(source, folder / "out", OPTIONS)
        made[name] = (source, folder / "out")
    return made


def altered(converted: Path, out: Path, change: Change) -> Path:
    shutil.copytree(converted, out)
    model = onnx.load(out / "model.onnx")
    change(model.graph)
    onnx.save(model, out / "model.onnx")
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    manifest["graph_digest"] = file_digest(out / "model.onnx")
    (out / MANIFEST_FILE).write_text(json.dumps(manifest))
    return out


def test_right_ones_pass(pairs: dict[str, tuple[Path, Path]]) -> None:
    for source, out in pairs.values():
        assert verify(source, out, OPTIONS).passed


@pytest.mark.parametrize(
    ("which", "change", "place"),
    [
        ("full", attribute(0, "local_window_size", lambda w: w + 1), "layer 0"),
        ("full", attribute(1, "local_window_size", lambda w: w - 1), "layer 1"),
        ("full", attribute(1, "alibi_slopes", lambda s: [-x for x in s]), "layer 1"),
        ("full", attribute(2, "scale", lambda s: s * 1.01), "layer 2"),
        ("full", shifted_positions, "layer 0"),
        ("full", shifted_table, "layer 0"),
        ("full", late_rows_of_the_table, "layer 0"),
        ("full", swapped_caches, "layer 2"),
        ("full", swapped_key_and_value, "layer 1"),
        ("capped", attribute(2, "softcap", lambda _: 0.0), "layer 2"),
    ],
    ids=[
        "window one more",
        "window one less",
        "slopes negated",
        "scale off by a hundredth",
        "positions shifted",
        "rotary table shifted",
        "rotary table wrong from a row on",
        "caches swapped",
        "key and value swapped",
        "softcap dropped",
    ],
)
def test_wrong_ones_are_caught(
    pairs: dict[str, tuple[Path, Path]], which: str, change: Change, place: str, tmp_path: Path
) -> None:
    source, out = pairs[which]
    with pytest.raises(VerificationError, match=place):
        verify(source, altered(out, tmp_path / "wrong", change), OPTIONS)


def test_no_verify_is_recorded(tmp_path: Path) -> None:
    source = d.Decoder().save(tmp_path / "source")
    convert(source, tmp_path / "out", ConvertOptions(max_positions=64, verify=False))
    assert json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())["verification"]["verified"] is False


def test_wrong_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagegraft.graphpass.recognise import score

    right = score.fit_visible
    monkeypatch.setattr(score, "fit_visible", lambda rows, name: (right(rows, name) or 9) + 1)
    monkeypatch.setattr(score, "_prove", lambda *_: None)
    source = d.Decoder(visible=d.window(6)).save(tmp_path / "source")
    with pytest.raises(VerificationError):
        convert(source, tmp_path / "out", OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_what_passes_by_the_sources_noise_is_compared_attention_by_attention(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("pagegraft.graphpass.verify")
    monkeypatch.setitem(module.CONTEXT_FRACTION, "float32", 1e-9)
    source, out = pairs["full"]
    result = verify(source, out, OPTIONS)
    assert result.passed
    assert result.context_fraction > 1e-9
    assert result.source_noise < 1e-3  # of a model that rounds nothing: a wrong one is not excused
    assert result.attention_difference is not None
    assert 0 < result.attention_difference < 1e-4

    monkeypatch.setattr(module, "NOISE_FACTOR", 1e9)
    wrong = altered(out, tmp_path / "wrong", attribute(2, "scale", lambda s: s * 1.01))
    with pytest.raises(VerificationError, match="layer 2"):
        verify(source, wrong, OPTIONS)


@dataclass(frozen=True)
class Fixed:
    """Logits that depend on the tokens before, off by `error`: a source, or what is packed."""

    error: float = 0.0

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return np.cumsum(np.array(tokens, np.float64))[:, None] % 7 * np.array([1.0, -1.0]) + self.error

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        return [self.logits(tokens) for _, tokens in work]


@pytest.mark.parametrize("error", [np.nan, np.inf])
def test_a_source_that_overflows_when_nudged_excuses_nothing(error: float) -> None:
    schedule = Schedule(((3, 1, 4, 1, 5),), (((0, 5),),))

    def check(packed: Fixed) -> Verification:
        return compare(Fixed(), packed, schedule, nudged=lambda: nullcontext(Fixed(error)))  # type: ignore[arg-type]

    assert check(Fixed()).passed
    assert not check(Fixed(1.0)).passed


def test_what_is_paged_already_has_no_source_to_be_compared_with(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    _, out = pairs["full"]
    with pytest.raises(VerificationError, match="paged already"):
        verify(out, out, OPTIONS)

    def without_heads(graph: onnx.GraphProto) -> None:
        node = attention(graph, 1)
        node.attribute.remove(next(a for a in node.attribute if a.name == "num_heads"))

    with pytest.raises(NotConvertible, match="lacks num_heads"):
        convert(altered(out, tmp_path / "wrong", without_heads), tmp_path / "again", OPTIONS)


def test_memory_that_files_occupy_counts_as_free() -> None:
    from pagegraft.graphpass import source_facts

    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert source_facts._available_memory() == pytest.approx(int(lines["MemAvailable"].split()[0]) << 10, rel=0.1)
