"""Conformance cases as portable files in ONNX's backend-test layout, and back.

    DIR/README.md                                 layout and contract
    DIR/<group>/<case>/model.onnx                 one PagedAttention node, concrete shapes
    DIR/<group>/<case>/case.json                  id, files, types, and how each output is compared
    DIR/<group>/<case>/test_data_set_0/input_<i>.pb  .npy    the model's inputs in order
    DIR/<group>/<case>/test_data_set_0/output_<i>.pb .npy    its outputs in order, caches included

numpy has no bfloat16 and no fp8: those .npy files hold the bits as uint16 and uint8.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..errors import ContractError
from ..files import writing
from ..reference import paged_attention
from ..spec import INPUTS, OP_TYPE, OUTPUTS, AttentionAttributes
from ..validation import Array, Feeds, element_type, geometry_of
from .backends import Backend, unclaimed
from .call import NUMPY_TYPES, Call
from .cases import Case
from .check import MismatchError, check_outputs
from .node_model import ONNX_TYPES, domain_of, node_model, output_names
from .portable_rules import comparison_rules
from .run import Result, Status, run_call

__all__ = ["export_cases", "read_vector", "run_folder"]

_EXPORTED = ("compare", "chunks", "batch")
_DATA = "test_data_set_0"


def export_cases(folder: Path, cases: Sequence[Case]) -> tuple[int, int]:
    """Writes every case that ends in outputs and fits in a file; returns their number and size in bytes.

    Raises ContractError when `folder` exists and is not empty, or cannot be written; nothing is left behind then.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ContractError(f"{folder} exists and is not an empty folder; give a new folder for the vectors")
    chosen = [case for case in cases if case.kind in _EXPORTED]
    with writing(folder, ContractError, "name a new folder where you may write and where there is room"):
        size = _write_all(folder, chosen)
    return len(chosen), size


def _write_all(folder: Path, cases: Sequence[Case]) -> int:
    """Writes the cases into `folder`, which appears when they are complete; returns their size. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".vectors-") as work:
        root = Path(work) / "vectors"
        for case in cases:
            _write_case(root / case.id, case)
        contract = resources.files(__package__.rpartition(".")[0]).joinpath("README.md").read_text(encoding="utf-8")
        (root / "README.md").write_text(_LAYOUT + contract, encoding="utf-8")
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        if folder.exists():
            folder.rmdir()
        shutil.move(root, folder)
    return size


def _write_case(place: Path, case: Case) -> None:
    call = case.call()
    expected = paged_attention(call.feeds, call.parsed())
    data = place / _DATA
    data.mkdir(parents=True)
    onnx.save(node_model(call, domain_of(call), concrete=True), place / "model.onnx")
    names = [name for name in output_names(call) if name]
    document: dict[str, Any] = {"id": case.id, "domain": domain_of(call), "inputs": [], "outputs": []}
    for kind, arrays in (("input", call.feeds), ("output", {name: expected[name] for name in names})):
        for i, (name, array) in enumerate(arrays.items()):
            (data / f"{kind}_{i}.pb").write_bytes(_tensor(array, name).SerializeToString())
            np.save(data / f"{kind}_{i}.npy", _plain(array))
            entry: dict[str, Any] = {"name": name, "file": f"{_DATA}/{kind}_{i}", "type": element_type(array)}
            entry |= {"onnx_type": ONNX_TYPES[element_type(array)], "shape": list(array.shape)}
            document[f"{kind}s"].append(entry)
    for entry, rule in zip(document["outputs"], comparison_rules(call, expected, names), strict=True):
        entry["compare"] = rule
    (place / "case.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _plain(array: Array) -> Array:
    kind = element_type(array)
    return array.view({"bfloat16": np.uint16, "float8e4m3fn": np.uint8}.get(kind, array.dtype))


def _tensor(array: Array, name: str) -> onnx.TensorProto:
    return helper.make_tensor(name, ONNX_TYPES[element_type(array)], array.shape, array.tobytes(), raw=True)


def run_folder(backend: Backend, folder: Path, *, xfails: tuple[str, ...] = ()) -> list[Result]:
    """Runs every vector below `folder` (a folder with a model.onnx) on a backend. Raises ContractError for none."""
    places = sorted(path.parent for path in folder.rglob("model.onnx"))
    if not places:
        raise ContractError(f"{folder} holds no model.onnx; make vectors with: pagegraft conformance --export {folder}")
    results = []
    for place in places:
        id = place.relative_to(folder).as_posix()
        result = _run_vector(backend, place, id)
        if any(fnmatchcase(id, pattern) for pattern in xfails) and result.status != "not claimed":
            status: Status = "xpassed" if result.status == "passed" else "xfailed"
            result = replace(result, status=status)
        results.append(result)
    return results


def _run_vector(backend: Backend, place: Path, id: str) -> Result:
    group = id.split("/")[0]
    call, expected = read_vector(place)
    reason = unclaimed(backend.capabilities(), call)
    if reason is not None:
        return Result(id=id, group=group, status="not claimed", detail=reason)

    def stored_or_reference(feeds: Feeds, attributes: AttentionAttributes) -> Mapping[str, Array]:
        # The checker asks a second time only for a call whose caches hold other codes than the vector's.
        return expected if feeds is call.feeds else paged_attention(feeds, attributes)

    begin = time.perf_counter()
    private, detail, error = call.copy(), "", None
    try:
        outputs = run_call(backend, private)
        error = check_outputs(call, outputs, stored_or_reference)
    except MismatchError as mismatch:
        detail = str(mismatch)
    except Exception as raised:
        detail = f"raised {type(raised).__name__}: {raised}"
    status: Status = "failed" if detail else "passed"
    spent = time.perf_counter() - begin
    return Result(id=id, group=group, status=status, detail=detail, seconds=spent, error=error)


def read_vector(place: Path) -> tuple[Call, dict[str, Array]]:
    """The call and the expected outputs of one folder, from its model and .pb files, named by the node's indices.

    Raises ContractError for a model that is not a single PagedAttention node or for missing data.
    """
    try:
        graph = onnx.load(place / "model.onnx").graph
    except Exception as error:  # protobuf's and onnx's own exceptions
        raise ContractError(f"{place / 'model.onnx'} is no ONNX model ({error}); export it again") from None
    if len(graph.node) != 1 or graph.node[0].op_type != OP_TYPE:
        raise ContractError(
            f"{place / 'model.onnx'}: expected one {OP_TYPE} node, got {[n.op_type for n in graph.node]}"
        )
    node = graph.node[0]
    tensors = _read_all(place, "input", [value.name for value in graph.input])
    tensors |= {t.name: _array(t) for t in graph.initializer}
    results = _read_all(place, "output", [value.name for value in graph.output])
    feeds = {p.name: tensors[node.input[p.index]] for p in INPUTS if _at(node.input, p.index)}
    expected = {p.name: results[node.output[p.index]] for p in OUTPUTS if _at(node.output, p.index)}
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attributes = {name: v.decode() if isinstance(v, bytes) else v for name, v in attributes.items()}
    call = Call(feeds, attributes)
    geometry_of(call.feeds, call.parsed())
    return call, expected


def _at(names: Sequence[str], index: int) -> bool:
    return index < len(names) and bool(names[index])


def _read_all(place: Path, kind: str, names: Iterable[str]) -> dict[str, Array]:
    found = {}
    for i, name in enumerate(names):
        path = place / _DATA / f"{kind}_{i}.pb"
        if not path.is_file():
            raise ContractError(f"{path} is missing; export the vectors again")
        found[name] = _array(onnx.TensorProto.FromString(path.read_bytes()))
    return found


def _array(tensor: onnx.TensorProto) -> Array:
    by_onnx_type = {number: kind for kind, number in ONNX_TYPES.items()}
    kind = by_onnx_type.get(tensor.data_type)
    if kind is not None and tensor.HasField("raw_data"):
        return np.frombuffer(tensor.raw_data, NUMPY_TYPES[kind]).reshape(tuple(tensor.dims)).copy()
    return np.asarray(numpy_helper.to_array(tensor))


_LAYOUT = """# PagedAttention test vectors

Each folder `<group>/<case>` is one call of the op in ONNX's backend-test layout: `model.onnx` is a single node;
`test_data_set_0/input_<i>.pb` and `output_<i>.pb` are its inputs and outputs as serialised `TensorProto`, in the order
of the model's inputs and outputs. The same tensors lie beside them as `.npy`; bfloat16 and fp8, which numpy does not
have, are stored there as the bits in uint16 and uint8. Cache outputs are always included: the caches after the call.

`case.json` names the files with their ONNX element types and says how each output is compared:

* `{"exact": true}`: bit for bit.
* `{"steps": n, "code_bits": b}`: stored codes of b bits may be n steps apart (8: two's complement bytes, or sign and
  magnitude for fp8; 4: two codes a byte, low nibble first). A nibble that an odd head size leaves over has no meaning.
* `{"absolute": x}`: the largest difference; NaN and infinities must be the same. For `output`,
  `"absolute_if_stored_differs"` holds instead when a stored code differs within its steps.

To replay them with a C++ program, read the `.pb` files (or the `.npy` files), run the model with the same tensor bound
as cache input and cache output, and compare. The contract follows.

---

"""
