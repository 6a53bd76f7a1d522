"""The CPU op as onnxruntime sees it: names, binding, shape inference, what is refused when, concurrent runs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime
import pytest
from pagegraft.custom_ops import register
from pagegraft.custom_ops.conformance import Case, all_cases
from pagegraft.custom_ops.conformance.call import Call, Setup, build
from pagegraft.custom_ops.conformance.check import check_outputs
from pagegraft.custom_ops.conformance.cpu_backend import CpuBackend
from pagegraft.custom_ops.conformance.node_model import domain_of, node_model
from pagegraft.custom_ops.errors import ContractError
from pagegraft.custom_ops.reference import paged_attention
from pagegraft.custom_ops.validation import geometry_of

CASES = {case.id: case for case in all_cases()}
SAMPLE = ["core/decode_float16", "masks/everything", "quantised/int8_PER_CHANNEL_float16", "latent/float32"]


def _session(model: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("domain", ["com.microsoft", "pagegraft"])
@pytest.mark.parametrize(
    "name", ["core/decode_float32", "core/mixed_float16", "rotary/norm_bfloat16", "quantised/int4_packed_qkv"]
)
def test_both_names_run(domain: str, name: str) -> None:
    """float32 is registered under both."""
    call = CASES[name].call()
    private = call.copy()
    check_outputs(call, CpuBackend(domain=domain).run(private.feeds, private.attributes), paged_attention)


@pytest.mark.parametrize("name", ["core/decode_float32", "core/mixed_float16", "quantised/int8_PER_TOKEN_float32"])
def test_a_plain_run_returns_updated_caches(name: str) -> None:
    """Without I/O binding the caches are copied; the inputs stay as they were."""
    call = CASES[name].call()
    session = _session(node_model(call, domain_of(call), concrete=False))
    before = call.copy()
    names = [o.name for o in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, call.feeds), strict=True))
    check_outputs(before, outputs, paged_attention)
    assert all(call.feeds[n].tobytes() == before.feeds[n].tobytes() for n in call.feeds)


def test_cache_outputs_may_be_left_out() -> None:
    """The bound cache is then updated in place all the same."""
    call = CASES["core/decode_float32"].call()
    model = node_model(call, domain_of(call), concrete=False)
    del model.graph.output[1:]
    del model.graph.node[0].output[1:]
    session, private = _session(model), call.copy()
    binding = session.io_binding()
    for name, array in private.feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output("output", "cpu")
    session.run_with_iobinding(binding)
    outputs = {"output": binding.get_outputs()[0].numpy()}
    outputs |= {f"{n}_out": private.feeds[n] for n in ("key_cache", "value_cache")}
    check_outputs(call, outputs, paged_attention)


def _compared() -> list[Case]:
    chosen = [c for c in all_cases() if c.kind == "compare" and sum(c.setup.new) > 0]
    return [c for c in chosen if c.group != "stress" and "_f16_b16" not in c.id][::6]


@pytest.mark.parametrize("case", _compared(), ids=lambda c: c.id)
def test_the_inferred_shape_is_the_output_shape(case: Case) -> None:
    """What shape inference derives from concrete inputs is right, or left open."""
    call = case.call()
    model = node_model(call, domain_of(call), concrete=True)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    g = geometry_of(call.feeds, call.parsed())
    inferred = {o.name: o.shape for o in _session(model).get_outputs()}
    shapes = {"output": (g.tokens, g.query_heads * g.value_head_size)}
    shapes |= {f"{n}_out": a.shape for n, a in call.feeds.items() if f"{n}_out" in inferred}
    for name, shape in shapes.items():
        for got, want in zip(inferred[name] or shape, shape, strict=True):
            assert got == want or not isinstance(got, int), f"{name}: inferred {inferred[name]}, is {shape}"


#: Attributes that only the shapes of the feeds can contradict.
_AT_RUN_TIME = {"negative/attribute_v_head_size_beyond_head_size"}


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("negative/attribute_") and n not in _AT_RUN_TIME])
def test_bad_attributes_are_refused_when_the_session_is_made(name: str) -> None:
    case = CASES[name]
    call = case.call()
    assert case.spoil is not None
    case.spoil(call)
    with pytest.raises(ContractError) as refusal:
        CpuBackend(threads=1).session(call)
    assert any(word in str(refusal.value) for word in case.names)


def test_one_session_serves_threads() -> None:
    """Concurrent runs of one session, each on caches of its own, agree with the reference."""
    setup = Setup(new=(1, 9, 3), past=(40, 0, 17), head_size=32)
    calls = [build(setup, seed) for seed in range(16)]
    backend = CpuBackend(threads=2)
    backend.session(calls[0])

    def work(call: Call) -> float:
        private = call.copy()
        return check_outputs(call, backend.run(private.feeds, private.attributes), paged_attention)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, calls * 4)) <= 1.0


@pytest.mark.parametrize("name", SAMPLE)
def test_results_are_the_same_every_time(name: str) -> None:
    backend = CpuBackend(threads=2)
    results = set()
    for _ in range(5):
        private = CASES[name].call()
        outputs = backend.run(private.feeds, private.attributes)
        results.add(b"".join(np.ascontiguousarray(a).tobytes() for a in outputs.values()))
    assert len(results) == 1


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["naive", "scalar", "avx2", "avx512", "avx512vbmi", "neon"])
def test_every_instruction_set_passes(isa: str) -> None:
    """PAGEGRAFT_ISA chooses one of those that the processor and the build have; the choice holds for a process."""
    command = [sys.executable, "-c", "from pagegraft.custom_ops.main import main; main()", "conformance"]
    for group in ("core", "quantised", "latent"):
        command += ["--group", group]
    environment = {**os.environ, "PAGEGRAFT_ISA": isa}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if "PAGEGRAFT_ISA: expected one of" in " ".join((done.stdout + done.stderr).split()):
        pytest.skip(f"this machine or build has no {isa} kernels")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["masks/alibi_float16", "quantised/int8_PER_TOKEN_float16", "core/value_head_float16"])
def test_the_microsoft_name_refuses_what_only_ours_can_say(name: str) -> None:
    """Such a node would not run on a stock onnxruntime."""
    private = CASES[name].call()
    with pytest.raises(ContractError):
        CpuBackend(domain="com.microsoft").run(private.feeds, private.attributes)
