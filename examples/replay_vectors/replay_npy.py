"""Replays exported PagedAttention vectors with onnxruntime and numpy alone: replay_npy.py VECTORS LIBRARY"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


def numbers(x, kind):  # what is compared: values, or stored codes as integers
    if kind == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if kind == "float8e4m3fn":
        return np.where(x >= 128, 128 - x.astype(np.int32), x)
    return np.stack([x & 15, x >> 4]) if kind == "uint8" else x


def agrees(got, want, entry, same_codes):
    rule, kind = entry["compare"], entry["type"]
    limit = 0 if "exact" in rule else rule.get("steps", rule.get("absolute"))
    limit = limit if same_codes else rule.get("absolute_if_stored_differs", limit)
    a, b = numbers(got, kind).astype(np.float64), numbers(want, kind).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return ((np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b))).all()


def replay(folder, options, read):
    case = json.loads((folder / "case.json").read_text())
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    want = {e["name"]: read(folder / e["file"], e) for e in case["outputs"]}
    memory = {e["name"]: read(folder / e["file"], e) for e in case["inputs"]} | {
        "output": np.zeros_like(want["output"])
    }
    binding, values = session.io_binding(), {}
    for e in case["inputs"] + case["outputs"]:  # a cache output is the cache itself, updated in place
        name = e["name"].removesuffix("_out")
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(memory[name], e["onnx_type"])
        bind = binding.bind_ortvalue_input if e in case["inputs"] else binding.bind_ortvalue_output
        bind(e["name"], values[name])
    session.run_with_iobinding(binding)
    got = {name: memory[name.removesuffix("_out")] for name in want}
    same = all(np.array_equal(got[n], want[n]) for n in got if n != "output")
    return [e["name"] for e in case["outputs"] if not agrees(got[e["name"]], want[e["name"]], e, same)]


def main(read=lambda path, entry: np.load(f"{path}.npy")):
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} VECTORS LIBRARY")
    models, options = sorted(Path(sys.argv[1]).rglob("model.onnx")), ort.SessionOptions()
    if not models:
        sys.exit(f"{sys.argv[1]} holds no vectors; write them with: pagegraft conformance --export {sys.argv[1]}")
    try:
        options.register_custom_ops_library(sys.argv[2])
    except Exception as error:  # onnxruntime's own, of several types
        sys.exit(f"{sys.argv[2]} is no custom-op library that onnxruntime can load: {error}")
    results = {model.parent: replay(model.parent, options, read) for model in models}
    print(*(f"FAILED {place}: {', '.join(bad)}" for place, bad in results.items() if bad), sep="\n")
    print(f"{sum(not bad for bad in results.values())} of {len(results)} vectors agree")
    sys.exit(any(results.values()))


if __name__ == "__main__":
    main()
