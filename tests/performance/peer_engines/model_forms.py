"""The same weights in the form that each engine reads, made once from the demo's GGUF file.

The file holds 4-bit weights with a scale and a minimum for each 32 (Q4_1), 8-bit embeddings (Q8_0), which are also the
output layer, and float32 norms. Every form but the file itself holds those values expanded to float32, or float32
rounded to the type that the form's name tells.

Shape letters: `O` output features, `I` input features.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pagegraft.runtime.demo.gguf_model import GgufModel

__all__ = ["write_gguf", "write_safetensors"]

_BFLOAT16 = "BF16"
_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def write_safetensors(gguf: Path, export: Path, target: Path) -> None:
    """A folder as transformers reads it: float32 weights, and `export`'s configuration and tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copy(export / name, target / name)
    weights = GgufModel(gguf).weights()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        shape = weight.shape[::-1] if _is_projection(weight.name) else weight.shape
        end = offset + weight.num_bytes
        header[weight.name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (target / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for chunk in weight.chunks():
                rows = chunk.T if _is_projection(weight.name) else chunk
                out.write(np.ascontiguousarray(rows, "<f4").data)


def _is_projection(name: str) -> bool:
    """Projections come as `[I, O]`; transformers wants `[O, I]`. The embedding is `[vocabulary, I]` in both."""
    return "_proj" in name


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """The GGUF file `source` with every matrix as `kind`: "F32", "F16" or "BF16"; all metadata is kept."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item)
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")])
    for name, rows in _matrices(reader):
        if rows.ndim == 1 or kind == "F32":
            writer.add_tensor(name, rows)
        elif kind == _BFLOAT16:
            stored = rows.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, rows.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(reader: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
