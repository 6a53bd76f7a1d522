"""The part of a conversion that gives the caches another type: choose a format, find scales, rewrite, measure.

The graph is first converted and verified with caches of its compute type, so that quantisation hides no error of the
rewrite; then its caches change, and the result is measured against the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from .accuracy import KvAccuracy, measure
from .cache_storage import storage_type
from .calibrate import KvScales, blocks_for, compute_scales, windows_of
from .errors import KvCacheError
from .external_data import load_graph
from .options import ConvertOptions
from .packed import PackedModel
from .rewrite.cache_dtype import KV_DTYPES, CacheFormat, set_cache_format
from .texts import TokenText, bundled_text, file_text

__all__ = [
    "KvRequest",
    "change_caches",
    "compare_caches",
    "form_of",
    "kept_graph",
    "kv_bytes_per_token",
    "measure_caches",
    "read_request",
]

Progress = Callable[[str], None]

#: What `--kv-quant` takes -> granularity of the contract.
KV_QUANTS = {"per-token": "PER_TOKEN", "per-channel": "PER_CHANNEL", "per-tensor": "PER_TENSOR"}
#: Name of the float-cache graph while both exist.
_FLOAT_FILE = ".float-cache.onnx"
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class KvRequest:
    """The cache format that the options ask for, and static scales when they came from a file."""

    form: CacheFormat
    scales: KvScales | None = None


def read_request(options: ConvertOptions) -> KvRequest | None:
    """What the options say of the caches; None when they are to stay as the model computes.

    int8 has scales per token by default, except for targets whose op has static scales only; int4 and fp8 have scales
    per channel, and those of a file are as the file says. Raises KvCacheError for options that do not go together.
    """
    if options.kv_dtype is None:
        if options.kv_quant is not None or options.kv_scales is not None:
            raise KvCacheError("scales need a quantised cache; add --kv-dtype int8, int4 or fp8")
        return None
    scales = None if options.kv_scales is None else KvScales.load(Path(options.kv_scales))
    if scales is not None and options.kv_quant is None:
        form = CacheFormat(dtype=_dtype(options.kv_dtype), quant=scales.form.quant)
    else:
        form = form_of(options.kv_dtype, options.kv_quant, target=options.target)
    if form.quant == "PER_TOKEN" and options.target != "cpu":
        raise KvCacheError(f"scales per token run on target cpu only, not on {options.target}; use per-channel")
    if scales is not None and scales.form != form:
        raise KvCacheError(
            f"{options.kv_scales} holds {scales.form.quant} scales for {scales.form.dtype} caches, wanted are "
            f"{form.quant} for {form.dtype}; calibrate for that"
        )
    return KvRequest(form, scales)


def form_of(kv_dtype: str, kv_quant: str | None, *, target: str = "cpu") -> CacheFormat:
    """The format of a user's words; `kv_quant` None is the default for the type and target. Raises KvCacheError."""
    dtype = _dtype(kv_dtype)
    if kv_quant is not None and kv_quant not in KV_QUANTS:
        raise KvCacheError(f"there are no scales '{kv_quant}'; name one of {', '.join(KV_QUANTS)}")
    if kv_quant is not None:
        return CacheFormat(dtype=dtype, quant=KV_QUANTS[kv_quant])
    if dtype not in spec.QUANTISED_CACHE_DTYPES:
        return CacheFormat(dtype=dtype)
    return CacheFormat(dtype=dtype, quant="PER_TOKEN" if dtype == "int8" and target == "cpu" else "PER_CHANNEL")


def _dtype(kv_dtype: str) -> str:
    if kv_dtype not in KV_DTYPES:
        raise KvCacheError(f"there is no cache type '{kv_dtype}'; name one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[kv_dtype]


def change_caches(
    folder: Path, manifest: names.Manifest, request: KvRequest, *, progress: Progress = lambda _: None
) -> names.Manifest:
    """Gives the caches of the converted model in `folder` the format asked for. Returns its new manifest, unsaved.

    Static scales that the request does not bring are computed from the bundled calibration text. The data files stay
    as they are. Raises KvCacheError for scales of another model.
    """
    file = folder / manifest.model_file
    _check_target(manifest, request.form)
    scales = request.scales
    if scales is not None and scales.source_digest != manifest.source.get("digest"):
        raise KvCacheError("the scales were computed for another source model; calibrate a conversion of this one")
    if scales is None and request.form.static:
        progress("computing scales from the bundled calibration text")
        text = bundled_text("calibration", folder, manifest.vocab_size)
        scales = compute_scales(file, manifest, text, request.form)
    model = load_graph(file)
    changed = set_cache_format(model, manifest, request.form, () if scales is None else scales.layers)
    ir.save(model, file)
    return replace(changed, graph_digest=names.file_digest(file))


def _check_target(manifest: names.Manifest, form: CacheFormat) -> None:
    """Raises KvCacheError for caches that the target's kernel does not have."""
    own = manifest.compute_dtype
    if manifest.target == "ascend" and form.dtype not in (own, "int8"):
        raise KvCacheError(f"the Ascend kernel stores {own} or int8 here, not {form.dtype}")
    if manifest.target == "ort-cuda" and form.dtype not in (own, *spec.QUANTISED_CACHE_DTYPES):
        raise KvCacheError(f"onnxruntime's CUDA kernel stores {own}, int8, int4 or fp8 here, not {form.dtype}")


@contextmanager
def kept_graph(folder: Path, manifest: names.Manifest) -> Iterator[Path]:
    """A second copy of the graph beside the first (data files are shared), for as long as the block runs."""
    copy = folder / _FLOAT_FILE
    copy.write_bytes((folder / manifest.model_file).read_bytes())
    try:
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def measure_caches(
    reference: tuple[Path, names.Manifest],
    candidate: tuple[Path, names.Manifest],
    text: TokenText,
    *,
    progress: Progress = lambda _: None,
) -> KvAccuracy:
    """Compares two graphs (file and manifest each) of one model over a text."""
    windows = windows_of(text.tokens, reference[1].max_positions)
    models = [
        PackedModel(file, manifest, num_blocks=blocks_for(windows, _BLOCK_SIZE), block_size=_BLOCK_SIZE, threads=0)
        for file, manifest in (reference, candidate)
    ]
    result = measure(models[0], models[1], windows, text, progress=progress)
    return result


def compare_caches(
    reference: Path | str, folder: Path | str, text: Path | str | None = None, *, progress: Progress = lambda _: None
) -> KvAccuracy:
    """Compares a converted model with another conversion of the same source: its caches against the former's.

    `text` is a text file, None the bundled evaluation text. Raises ManifestError for what is no converted model,
    KvCacheError for a reference with quantised caches, conversions of different sources and a text that cannot be used.
    """
    reference, folder = Path(reference), Path(folder)
    first, second = names.Manifest.load(reference), names.Manifest.load(folder)
    if first.source.get("digest") != second.source.get("digest"):
        raise KvCacheError(f"{reference} and {folder} were converted from different models; convert one source twice")
    if quantised := next((layer for layer in first.layers if layer.quant != "NONE"), None):
        raise KvCacheError(
            f"{reference} has {quantised.key_dtype} caches, which lose accuracy themselves; compare against a "
            "conversion with float caches: one without --kv-dtype"
        )
    vocab = first.vocab_size
    tokens = bundled_text("evaluation", folder, vocab) if text is None else file_text(Path(text), folder, vocab)
    sides = ((reference / first.model_file, first), (folder / second.model_file, second))
    return measure_caches(*sides, tokens, progress=progress)


def kv_bytes_per_token(manifest: names.Manifest) -> int:
    """Bytes that one token takes in all caches, scales per token included."""
    total = 0
    for layer in manifest.layers:
        for size, dtype in ((layer.key_head_size, layer.key_dtype), (layer.value_head_size, layer.value_dtype)):
            if size is None or dtype is None:
                continue
            width = spec.cache_head_width(size, dtype) * storage_type(dtype).itemsize
            total += layer.kv_heads * (width + (4 if layer.quant == "PER_TOKEN" else 0))
    return total
