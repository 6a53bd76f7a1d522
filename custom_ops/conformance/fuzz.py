"""Feeds the CPU op malformed shapes and values: each call must end in an error or in a right result.

    python -m pagegraft.custom_ops.conformance.fuzz --count 1000000 [--seed 0] [--seconds 600]

Caches, scales and the output lie between guard regions; a byte changed there, or a cache changed by a call that failed,
is a finding. What is right is decided by the float64 reference: it accepts exactly the calls that the op must accept.
A crash ends the process, which is the finding; the last call is then reproduced by its number (`--first`, `--count 1`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from ..errors import ContractError, PagegraftError
from ..reference import paged_attention
from ..spec import AttentionAttributes
from ..validation import Array, Geometry, check_values, geometry_of
from .call import Call, Setup, build
from .check import MismatchError, check_outputs, written_slots
from .cpu_backend import IN_PLACE, CpuBackend, ort_value
from .malformed import malformed
from .node_model import output_names

__all__ = ["FuzzFindingError", "fuzz", "main"]

_GUARD = 512
_GUARD_BYTE = 0xA5
_SMALL: dict[str, Any] = {
    "new": (1, 3),
    "past": (5, 2),
    "block_size": 4,
    "head_size": 8,
    "query_heads": 4,
    "kv_heads": 2,
}
_LATENT: dict[str, Any] = {"kv_heads": 1, "latent_value_size": 4}

#: Signatures (attributes, inputs, element types) whose feeds are made malformed.
SETUPS: tuple[Setup, ...] = tuple(
    Setup(**{**_SMALL, **extra})
    for extra in (
        {},
        {"compute": "float16"},
        {"compute": "bfloat16", "slots": "explicit"},
        {"slots": "explicit"},
        {"packed": True},
        {"packed": True, "slots": "explicit", "compute": "float16", "rotary_dim": 8},
        {"attributes": {"local_window_size": 3}, "slots": "explicit"},
        {"attributes": {"is_causal": 0, "softcap": 2.0}, "sink": True},
        {"attributes": {"alibi_slopes": (1.0, 0.5, 0.25, 0.125), "local_window_size": 6}},
        {"rotary_dim": 8, "norm": True, "metadata": (3, 6)},
        {"rotary_dim": 4, "attributes": {"rotary_interleaved": 1}, "metadata": (3, 6, 1)},
        {"value_head_size": 6},
        {"cache": "int8", "k_quant": "PER_TENSOR"},
        {"cache": "int8", "k_quant": "PER_CHANNEL", "slots": "explicit"},
        {"cache": "int8", "k_quant": "PER_TOKEN", "slots": "explicit"},
        {"cache": "float8e4m3fn", "k_quant": "PER_CHANNEL"},
        {"cache": "int4", "k_quant": "PER_TENSOR", "head_size": 7},
        {"cache": "int4", "k_quant": "PER_CHANNEL", "packed": True},
        {"cache": "float16"},
        {**_LATENT, "attributes": {"scale": 0.3}},
        {**_LATENT, "attributes": {"scale": 0.3}, "slots": "explicit", "cache": "int8", "k_quant": "PER_TOKEN"},
    )
)


class FuzzFindingError(PagegraftError):
    """A malformed call that ended neither in an error nor in a right result; the message says how to repeat it."""


@dataclass
class _Target:
    """One session, a valid call that fits it, what is known of the call, and its inputs as onnxruntime sees them."""

    session: onnxruntime.InferenceSession
    call: Call
    attributes: AttentionAttributes
    geometry: Geometry
    values: dict[str, onnxruntime.OrtValue]

    @classmethod
    def of(cls, backend: CpuBackend, call: Call) -> _Target:
        attributes = call.parsed()
        values = {name: ort_value(array) for name, array in call.feeds.items()}
        return cls(backend.session(call), call, attributes, geometry_of(call.feeds, attributes), values)

    def geometry_of(self, call: Call) -> Geometry:
        """Geometry of a changed call. Raises ContractError."""
        base = self.call.feeds
        if all(a.shape == base[n].shape and a.dtype == base[n].dtype for n, a in call.feeds.items()):
            return self.geometry
        return geometry_of(call.feeds, self.attributes)


def fuzz(count: int, seed: int, *, first: int = 0, seconds: float = float("inf")) -> Counter[str]:
    """Runs calls number `first` to `first + count`, fewer when the time is up; returns how many ended how.

    Raises FuzzFindingError at the first finding.
    """
    backend = CpuBackend(threads=1)
    targets = [_Target.of(backend, build(setup, i)) for i, setup in enumerate(SETUPS)]
    outcomes: Counter[str] = Counter()
    stop = time.monotonic() + seconds
    for number in range(first, first + count):
        if time.monotonic() > stop:
            break
        rng = np.random.default_rng((seed, number))
        target = targets[rng.integers(len(targets))]
        call = malformed(target.call, rng)
        try:
            outcomes[_outcome(target, call)] += 1
        except MismatchError as mismatch:
            again = f"--seed {seed} --first {number} --count 1"
            raise FuzzFindingError(f"call {number} ({_describe(call)}): {mismatch}; repeat it with {again}") from None
    return outcomes


def _guarded(array: Array) -> tuple[Array, Array]:
    """A copy of the array between guards, and the memory that holds all three."""
    memory = np.full(array.nbytes + 2 * _GUARD, _GUARD_BYTE, np.uint8)
    inner = memory[_GUARD : _GUARD + array.nbytes]
    inner[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return inner.view(array.dtype).reshape(array.shape), memory


def _outcome(target: _Target, call: Call) -> str:
    """Runs one call. Raises MismatchError for a finding."""
    width, expected_error = _verdict(target, call)
    if any(call.feeds[name].dtype != array.dtype for name, array in target.call.feeds.items()):
        expected_error = expected_error or ContractError("the session was made for other element types")
    written = [name for name in IN_PLACE.values() if name in call.feeds]
    guarded = {name: _guarded(call.feeds[name]) for name in written}
    feeds = {n: guarded[n][0] if n in guarded else np.ascontiguousarray(a) for n, a in call.feeds.items()}
    rows = call.feeds["query"].shape[0] if call.feeds["query"].ndim else 0
    output, memory = _guarded(np.full((rows, width), 0, call.feeds["query"].dtype))
    try:
        _run(target, Call(feeds, call.attributes), output)
        failed = ""
    except Exception as error:  # onnxruntime raises its own untyped exceptions
        failed = str(error) or "an error without text"
    for name, (_, around) in [*guarded.items(), ("output", (output, memory))]:
        if (around[:_GUARD] != _GUARD_BYTE).any() or (around[-_GUARD:] != _GUARD_BYTE).any():
            raise MismatchError(f"memory beside {name} was written")
    if failed:
        for name in written:
            if feeds[name].tobytes() != call.feeds[name].tobytes():
                raise MismatchError(f"{name} was changed although the call failed: {failed}")
        if expected_error is None:
            raise MismatchError(f"a call that the contract allows failed: {failed}")
        return "error"
    if expected_error is not None:
        raise MismatchError(f"no error; the contract says: {expected_error}")
    return _checked(target, call, feeds, output)


def _verdict(target: _Target, call: Call) -> tuple[int, ContractError | None]:
    """Width of the output, and what the contract objects to."""
    try:
        g = target.geometry_of(call)
        check_values(call.feeds, target.attributes, g)
    except ContractError as error:
        return 32, error
    return g.query_heads * g.value_head_size, None


def _checked(target: _Target, call: Call, feeds: dict[str, Array], output: Array) -> str:
    """Compares an accepted call with the reference; a call with values that are not finite only has to end."""
    floats = [a for a in call.feeds.values() if a.dtype.name in ("float32", "float16", "bfloat16")]
    if any(not (np.abs(a.astype(np.float32)) < 1e4).all() for a in floats) or _repeats_a_slot(target, call):
        return "ended"
    outputs = {out: feeds[name] for out, name in IN_PLACE.items() if out in output_names(call)}
    with np.errstate(all="ignore"):
        check_outputs(call, {**outputs, "output": output}, paged_attention)
    return "right"


def _repeats_a_slot(target: _Target, call: Call) -> bool:
    """True when two tokens have one slot, whose content the contract leaves open."""
    slots = written_slots(call, target.geometry_of(call))
    return len(np.unique(slots)) < len(slots)


def _run(target: _Target, call: Call, output: Array) -> None:
    binding = target.session.io_binding()
    base = target.call.feeds
    values = {n: target.values[n] if a is base[n] else ort_value(a) for n, a in call.feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in filter(None, output_names(target.call)):
        source = values[IN_PLACE[name]] if name in IN_PLACE else ort_value(output)
        binding.bind_ortvalue_output(name, source)
    target.session.run_with_iobinding(binding)


def _describe(call: Call) -> str:
    return ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in call.feeds.items())


def main() -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        outcomes = fuzz(options.count, options.seed, first=options.first, seconds=options.seconds)
    except FuzzFindingError as finding:
        print(f"finding: {finding}", file=sys.stderr)
        return 1
    spent = time.monotonic() - begin
    total = sum(outcomes.values())
    print(f"{total} calls in {spent:.0f} s ({total / spent:.0f} a second): {dict(outcomes)}; no finding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
