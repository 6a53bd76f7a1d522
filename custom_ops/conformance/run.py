"""Runs conformance cases on a backend and says of each whether it passed, failed, or was not claimed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import ContractError
from ..reference import paged_attention
from ..spec import UNMAPPED
from ..validation import Array
from .backends import Backend, Capabilities, ReferenceBackend, unclaimed
from .call import Call, build
from .cases import Case
from .check import MismatchError, Oracle, check_outputs
from .oracle import token_by_token

__all__ = ["Result", "Status", "oracle_for", "read_xfails", "run_call", "run_case", "run_cases"]

Status = Literal["passed", "failed", "not claimed", "xfailed", "xpassed"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of one case. `detail`: why it failed or what is not claimed. `error`: worst output error as a fraction of
    its tolerance, where outputs were compared."""

    id: str
    group: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    error: float | None = None


def oracle_for(backend: Backend) -> Oracle:
    """The reference; for the reference itself the independent formulation in `oracle`."""
    return token_by_token if isinstance(backend, ReferenceBackend) else paged_attention


def read_xfails(path: Path) -> tuple[str, ...]:
    """Ids or glob patterns of cases expected to fail, one a line; `#` begins a comment. Raises ContractError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ContractError(f"cannot read the xfails file {path}: {error.strerror}; give an existing file") from None
    return tuple(text for line in lines if (text := line.split("#")[0].strip()))


def run_cases(
    backend: Backend,
    cases: Iterable[Case],
    *,
    xfails: tuple[str, ...] = (),
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Runs the cases in order; `on_result` is told each outcome as it comes."""
    results = []
    for case in cases:
        result = run_case(backend, case, xfail=any(fnmatchcase(case.id, pattern) for pattern in xfails))
        on_result(result)
        results.append(result)
    return results


def run_case(backend: Backend, case: Case, *, xfail: bool = False) -> Result:
    """Runs one case. Whatever the backend raises is a failure, not an exception here."""
    begin = time.perf_counter()
    status: Status = "passed"
    detail, error = "", None
    reason = _unclaimed(backend.capabilities(), case)
    if reason is not None:
        return Result(id=case.id, group=case.group, status="not claimed", detail=reason)
    try:
        error = _RUNNERS[case.kind](backend, case)
    except MismatchError as mismatch:
        status, detail = "failed", str(mismatch)
    except Exception as raised:
        status, detail = "failed", f"raised {type(raised).__name__}: {raised}"
    if xfail:
        status = "xpassed" if status == "passed" else "xfailed"
    return Result(
        id=case.id, group=case.group, status=status, detail=detail, seconds=time.perf_counter() - begin, error=error
    )


def _unclaimed(capabilities: Capabilities, case: Case) -> str | None:
    if case.kind == "error" and not case.bad_id and not capabilities.validates:
        return "errors for malformed feeds"
    call = _far_call(case)[1] if case.kind == "far" else case.call()
    return unclaimed(capabilities, call, case.features)


def _run(backend: Backend, call: Call) -> dict[str, Array]:
    """Runs a private copy of the call."""
    return run_call(backend, call.copy())


def run_call(backend: Backend, call: Call) -> dict[str, Array]:
    """The outputs of one call, whose feeds the backend may change. Raises MismatchError for what is no dict."""
    outputs: object = backend.run(call.feeds, call.attributes)
    if not isinstance(outputs, Mapping):
        got = "None" if outputs is None else f"a {type(outputs).__name__}"
        raise MismatchError(f"run() returned {got}; it must return a dict from output name to numpy array")
    return dict(outputs)


def _compare(backend: Backend, case: Case) -> float:
    call = case.call()
    return check_outputs(call, _run(backend, call), oracle_for(backend))


def _error(backend: Backend, case: Case) -> float | None:
    call = case.call()
    if case.spoil is not None:
        case.spoil(call)
    if case.bad_id and backend.capabilities().bad_ids == "masked":
        masked = _masked(call)
        return check_outputs(masked, _run(backend, call), oracle_for(backend))
    private = call.copy()
    try:
        backend.run(private.feeds, private.attributes)
    except ValueError as error:
        if not any(name in str(error) for name in case.names):
            raise MismatchError(f"the error names none of {', '.join(case.names)}: {error}") from None
    except Exception as error:
        wanted = f"expected a ValueError that names {' or '.join(case.names)}"
        raise MismatchError(f"{wanted}; raised {type(error).__name__}: {error}") from None
    else:
        raise MismatchError(f"no error; one that names {' or '.join(case.names)} was expected")
    for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
        if name in call.feeds and private.feeds[name].tobytes() != call.feeds[name].tobytes():
            raise MismatchError(f"{name} was changed although the call failed")
    return None


def _masked(call: Call) -> Call:
    """The call with forbidden block ids and slots replaced by -1."""
    out = call.copy()
    blocks, block_size = call.feeds["key_cache"].shape[:2]
    for name, limit in (("block_table", blocks), ("slot_mapping", blocks * block_size)):
        if name in out.feeds:
            array = out.feeds[name]
            array[(array < UNMAPPED) | (array >= limit)] = UNMAPPED
    return out


def _chunks(backend: Backend, case: Case) -> float:
    call = case.call()
    tokens = call.feeds["query"].shape[0]
    worst = 0.0
    for k in range(1, tokens):
        first = _run(backend, _rows(call, 0, k))
        second = _rows(call, k, tokens)
        for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
            if f"{name}_out" in first:
                second.feeds[name] = first[f"{name}_out"]
        outputs = _run(backend, second)
        outputs["output"] = np.concatenate([first["output"], outputs["output"]])
        try:
            worst = max(worst, check_outputs(call, outputs, oracle_for(backend)))
        except MismatchError as mismatch:
            raise MismatchError(f"split after {k} of {tokens} tokens: {mismatch}") from None
    return worst


def _rows(call: Call, begin: int, end: int, sequence: int = 0) -> Call:
    """The call of packed rows [begin, end) of one sequence, with the same caches."""
    feeds = dict(call.feeds)
    start = int(feeds["cumulative_sequence_length"][sequence])
    for name in ("query", "key", "value", "slot_mapping"):
        if name in feeds:
            feeds[name] = feeds[name][begin:end]
    feeds["cumulative_sequence_length"] = np.array([0, end - begin], np.int32)
    feeds["past_seqlens"] = feeds["past_seqlens"][sequence : sequence + 1] + np.int32(begin - start)
    feeds["block_table"] = feeds["block_table"][sequence : sequence + 1]
    return Call(feeds, call.attributes)


def _batch(backend: Backend, case: Case) -> float:
    call = case.call()
    whole = _run(backend, call)
    worst = check_outputs(call, whole, oracle_for(backend))
    bounds = call.feeds["cumulative_sequence_length"].tolist()
    for s, (begin, end) in enumerate(pairwise(bounds)):
        solo = _rows(call, begin, end, s)
        outputs = _run(backend, solo)
        worst = max(worst, check_outputs(solo, outputs, oracle_for(backend)))
        alone, together = outputs["output"], whole["output"][begin:end]
        if backend.capabilities().bitwise and alone.tobytes() != together.tobytes():
            raise MismatchError(f"sequence {s} alone is not bitwise what it is in the batch")
    return worst


def _far_call(case: Case) -> tuple[Call, Call]:
    """The call with low block ids, and the same call with `id_offset` added to them in caches of untouched memory."""
    near = build(replace(case.setup, id_offset=0), case.seed)
    far = near.copy()
    blocks, offset = near.feeds["key_cache"].shape[0], case.setup.id_offset
    for name in ("key_cache", "value_cache"):
        if name in near.feeds:
            array = near.feeds[name]
            far.feeds[name] = np.zeros((blocks + offset, *array.shape[1:]), array.dtype)
            far.feeds[name][offset:] = array
    table = far.feeds["block_table"]
    table[(table >= 0) & (table < blocks)] += offset
    return near, far


def _far(backend: Backend, case: Case) -> float:
    near, far = _far_call(case)
    outputs = run_call(backend, far)
    offset = case.setup.id_offset
    for name in ("key_cache_out", "value_cache_out"):
        if name in outputs:
            cache = outputs[name]
            if cache[: min(offset, 64)].view(np.uint8).any():
                raise MismatchError(f"{name}: low blocks were written although only ids from {offset} are in use")
            outputs[name] = cache[offset:]
    return check_outputs(near, outputs, oracle_for(backend))


_RUNNERS: Mapping[str, Callable[[Any, Case], float | None]] = {
    "compare": _compare,
    "error": _error,
    "chunks": _chunks,
    "batch": _batch,
    "far": _far,
}
