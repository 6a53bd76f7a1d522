"""Makes small decoders with random weights and exports them: forms beyond those in tests/data/zoo.

Runs outside the test suite, in an environment of its own:

    pip install torch==2.13.0 transformers==5.24.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
    python tests/model/make_exports.py OUT [NAME ...]

Each model becomes OUT/<architecture>__<exporter>/model.onnx, with the difference between torch and the export in
`export.json`. Without names all are made; what an exporter cannot do is reported and left out. Exporters: `dyn` torch
dynamo with scaled-dot-product attention, `eager` dynamo with spelled-out attention, `ts` TorchScript with spelled-out
attention, `old` TorchScript of the modules written by hand in `export_modules.py` (forms of model code that
transformers does not have, or not any more; some of them are exported with `dyn` too).
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import export_modules
import numpy as np
import onnx
import onnxruntime as ort
import torch
from export_modules import BATCH, TOKENS, CacheShape, without_stack_traces
from export_sizes import ARCHITECTURES, SIZES, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer


def sizes_for(name: str) -> dict[str, Any]:
    """The configuration of an architecture, without the names it does not know."""
    known = AutoConfig.for_model(name)
    names = {*known.to_dict(), *known.attribute_map, *inspect.signature(type(known).__init__).parameters}
    return {k: v for k, v in SIZES.items() if k in names} | ARCHITECTURES[name]


def liven(model: torch.nn.Module) -> None:
    """Weights large enough for the context to matter, norms that are not all one, biases that are not zero."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


class Flat(torch.nn.Module):
    """A model of transformers with flat caches as inputs and outputs: key, value of each layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def cache_of(self, past: tuple[torch.Tensor, ...]) -> DynamicCache:
        """A cache object over the tensors."""
        cache = DynamicCache()
        for key, value in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = key, value, True
            layer.dtype, layer.device = key.dtype, key.device
            cache.layers.append(layer)
        return cache

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Logits and the caches with the new tokens."""
        cache = self.cache_of(past)
        extra = {"position_ids": position_ids} if self.takes_positions else {}
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **extra
        )
        present = [t for layer in out.past_key_values.layers[: len(past) // 2] for t in (layer.keys, layer.values)]
        return (out.logits, *present)


def from_transformers(name: str, attention: str) -> tuple[Flat, list[CacheShape]]:
    """The wrapped model and the shape of each cache."""
    config = AutoConfig.for_model(name, **sizes_for(name))
    config._attn_implementation = attention
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    liven(model)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True)
    cache = out.past_key_values
    layers = [layer for layer in cache.layers if layer.keys is not None]  # some models share caches between layers
    shapes = [tuple(t.shape) for layer in layers for t in (layer.keys, layer.values)]
    return Flat(model).eval(), [(BATCH, s[1], TOKENS, s[3]) for s in shapes]


def example(shapes: list[CacheShape], new: int, past: int, batch: int) -> list[torch.Tensor]:
    """Inputs for tracing and comparing."""
    generator = torch.Generator().manual_seed(new * 100 + past)
    ids = torch.randint(3, VOCAB, (batch, new), generator=generator)
    mask = torch.ones(batch, past + new, dtype=torch.int64)
    positions = torch.arange(past, past + new)[None].repeat(batch, 1)
    caches = []
    for shape in shapes:
        dims = [{BATCH: batch, TOKENS: past}.get(d, d) for d in shape]
        caches.append(torch.randn(dims, generator=generator))
    return [ids, mask, positions, *caches]


def export(wrapped: Any, shapes: list[CacheShape], file: Path, *, dynamo: bool, opset: int) -> None:
    """Writes the model."""
    kinds = ("key", "value") if len(shapes[0]) == 4 or shapes[0] != shapes[1] else ("key_value",)
    pasts = [f"past_key_values.{i // len(kinds)}.{kinds[i % len(kinds)]}" for i in range(len(shapes))]
    names = ["input_ids", "attention_mask", "position_ids", *pasts]
    presents = [n.replace("past_key_values", "present") for n in pasts]
    args = tuple(example(shapes, 3, 5, 2))
    common: dict[str, Any] = {"input_names": names, "output_names": ["logits", *presents], "opset_version": opset}
    if dynamo:
        free = torch.export.Dim.DYNAMIC
        rows = {0: free, 1: free}
        caches = tuple({axis: free for axis, d in enumerate(shape) if d in (BATCH, TOKENS)} for shape in shapes)
        dims = (rows, rows, rows, caches)
        torch.onnx.export(
            wrapped, args, str(file), dynamo=True, dynamic_shapes=dims, external_data=False, verbose=False, **common
        )
        without_stack_traces(file)
        return
    dynamic = {n: {0: "batch", 1: "new"} for n in ("input_ids", "position_ids", "logits")}
    dynamic["attention_mask"] = {0: "batch", 1: "total"}
    for group, word in ((pasts, "past"), (presents, "total")):
        for name, shape in zip(group, shapes, strict=True):
            marks = {BATCH: "batch", TOKENS: word}
            dynamic[name] = {axis: marks[d] for axis, d in enumerate(shape) if d in marks}
    torch.onnx.export(wrapped, args, str(file), dynamo=False, dynamic_axes=dynamic, do_constant_folding=True, **common)


def difference(wrapped: Any, shapes: list[CacheShape], file: Path) -> float:
    """Largest difference of logits between torch and onnxruntime, of their standard deviation, at three sizes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(str(file), options)
    worst = 0.0
    for new, past in ((9, 0), (1, 17), (4, 6)):
        args = example(shapes, new, past, 1)
        names = [
            "input_ids",
            "attention_mask",
            "position_ids",
            *(i.name for i in session.get_inputs() if i.name.startswith("past")),
        ]
        taken = {i.name for i in session.get_inputs()}
        feeds = {n: a.numpy() for n, a in zip(names, args, strict=False) if n in taken}
        with torch.no_grad():
            expected = wrapped(*args)[0].numpy()
        actual = session.run(["logits"], feeds)[0]
        worst = max(worst, float(np.abs(actual - expected).max() / expected.std()))
    return worst


def plans() -> dict[str, export_modules.Maker]:
    """What can be made, by name."""
    made: dict[str, Any] = {}
    for name in ARCHITECTURES:
        for tag, attention, dynamo in (("dyn", "sdpa", True), ("eager", "eager", True), ("ts", "eager", False)):
            made[f"{name}__{tag}"] = lambda n=name, a=attention, d=dynamo: (
                *from_transformers(n, a),
                {"dynamo": d, "opset": 18},
            )
    for name, make in export_modules.MODULES.items():
        made[name if "__" in name else f"{name}__old"] = make
    return made


def make(name: str, out: Path) -> dict[str, Any]:
    """Makes one model; what is known of it."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.onnx"
    wrapped, shapes, how = plans()[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(wrapped, shapes, file, **how)
    onnx.checker.check_model(str(file), full_check=False)
    facts = {"name": name, "bytes": file.stat().st_size, "difference_from_torch": difference(wrapped, shapes, file)}
    facts |= {"torch": torch.__version__, "opset": how["opset"]}
    (folder / "export.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 128}) + "\n")
    return facts


def main() -> int:
    """Makes the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for name in arguments.names or plans():
        try:
            facts = make(name, arguments.out)
            print(f"{name}: {facts['bytes']} bytes, {facts['difference_from_torch']:.1e} off", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: not made: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)
            if len(arguments.names) == 1:
                traceback.print_exc()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
