"""Caches in shared memory: read from another process, one engine at a time, nothing left behind after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pagegraft.custom_ops.manifest import Manifest
from pagegraft.runtime import LLM, SamplingParams
from pagegraft.runtime.engine.errors import ConfigurationError
from pagegraft.runtime.model.session import OnnxRunner
from pagegraft.runtime.model.shared_memory import attach

from tests.wiring.synthetic import continuation

Build = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    Path(f"/dev/shm/pagegraft-{name}").unlink(missing_ok=True)


HOLD = """
import sys, time
from pagegraft.runtime import LLM
llm = LLM(sys.argv[1], num_blocks=16, shared_memory=sys.argv[2])
print("ready", flush=True)
time.sleep(100)
"""

READ = """
import sys
from pagegraft.runtime.model.shared_memory import attach
tensors = attach(sys.argv[1]).tensors
(name, cache), = tensors.items()
print(name, cache.shape, [int(x) for x in cache.reshape(-1)[[int(i) for i in sys.argv[2].split(",")]]])
try:
    cache[0] = 1
except ValueError:
    print("read-only")
"""


def hold(folder: Path, name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_another_process_reads_what_the_engine_wrote(synthetic_model: Build, name: str) -> None:
    with LLM(synthetic_model(), num_blocks=16, shared_memory=name) as llm:
        request = llm._submit({"prompt_token_ids": [9, 8, 7, 6, 5]}, GREEDY)[0]
        llm.engine.step()
        blocks = list(request.choices[0].sequence.blocks[0])  # type: ignore[union-attr]
        while not request.is_finished:
            llm.engine.step()
        assert list(request.output().outputs[0].token_ids) == continuation([9, 8, 7, 6, 5], 6)
        slots = [blocks[i // 4] * 4 + i % 4 for i in range(5)]  # the prompt's
        shown = subprocess.run(
            [sys.executable, "-c", READ, name, ",".join(map(str, slots))], capture_output=True, text=True, check=True
        )
        assert shown.stdout.splitlines() == ["past_key_values.0.key (16, 4, 1, 1) [9, 8, 7, 6, 5]", "read-only"]
    assert not Path(f"/dev/shm/pagegraft-{name}").exists()


def test_a_region_belongs_to_one_engine_and_is_taken_over_after_kill_9(synthetic_model: Build, name: str) -> None:
    folder, region = synthetic_model(), Path(f"/dev/shm/pagegraft-{name}")
    process = hold(folder, name)
    try:
        with pytest.raises(ConfigurationError, match="in use by another engine"):
            LLM(folder, num_blocks=16, shared_memory=name)
        assert region.exists()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert region.exists()
    with LLM(folder, num_blocks=16, shared_memory=name) as llm:
        output = llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)[0].outputs[0]
        assert list(output.token_ids) == continuation([1, 2], 6)
    assert not region.exists()


def test_what_a_killed_engine_left_under_another_name_is_removed(synthetic_model: Build, name: str) -> None:
    folder, region = synthetic_model(), Path(f"/dev/shm/pagegraft-{name}")
    process = hold(folder, name)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert region.exists()
    living = hold(folder, f"{name}-living")
    try:
        assert not region.exists()
        with LLM(folder, num_blocks=16, shared_memory=f"{name}-third"):
            assert Path(f"/dev/shm/pagegraft-{name}-living").exists()
    finally:
        living.kill()
        living.wait()
        Path(f"/dev/shm/pagegraft-{name}-living").unlink(missing_ok=True)


def test_unusable_names_and_amounts_are_refused_and_leave_nothing(synthetic_model: Build, name: str) -> None:
    folder = synthetic_model()
    with pytest.raises(ConfigurationError, match="no name for shared memory"):
        LLM(folder, num_blocks=16, shared_memory="../x")
    with pytest.raises(ConfigurationError, match="no room"):
        LLM(folder, num_blocks=1 << 34, shared_memory=name)
    assert not Path(f"/dev/shm/pagegraft-{name}").exists()
    with pytest.raises(ConfigurationError, match="runner of your own"):
        LLM(folder, num_blocks=16, shared_memory=name, runner=OnnxRunner(folder, Manifest.load(folder)))
    with pytest.raises(ConfigurationError, match="device 'npu'"):
        LLM(folder, num_blocks=16, shared_memory=name, device="npu")


def test_a_load_that_fails_leaves_no_region(synthetic_model: Build, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError):
        LLM(synthetic_model(), num_blocks=16, shared_memory=name, max_num_seqs=1000)
    with LLM(synthetic_model(), num_blocks=16, shared_memory=name) as llm:
        assert llm.generate([{"prompt_token_ids": [1]}], GREEDY)


def test_another_users_region_is_refused_in_words(
    synthetic_model: Build, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: object, *arguments: int) -> int:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match="another user"):
        LLM(synthetic_model(), num_blocks=16, shared_memory=name)
    with pytest.raises(ConfigurationError, match="another user"):
        attach(name)
