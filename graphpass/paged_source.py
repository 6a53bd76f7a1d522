"""Converts a source that is paged already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names
from pagegraft.custom_ops import spec

from .adopt import PagedOracle, adopt_paged
from .errors import VerificationError
from .kv_cache import kv_bytes_per_token
from .normalise import Source
from .options import ConvertOptions
from .output import MODEL_FILE, data_file_facts, new_folder, write_model
from .packed import PackedModel
from .report import Report
from .verify import compare, make_schedule

__all__ = ["convert_paged"]


def convert_paged(
    source: Source, out: Path, model: ir.Model, options: ConvertOptions, progress: Callable[[str], None]
) -> Report:
    """Takes over a model that is paged already: its interface changes, its attentions do not."""
    nodes = model.graph.num_nodes()
    adopted = adopt_paged(model)
    model.opset_imports.setdefault(spec.MICROSOFT_DOMAIN, 1)
    with new_folder(out) as folder:
        files = write_model(model, source, folder, link=options.link)
        manifest = names.Manifest(
            model_file=MODEL_FILE,
            graph_digest=names.file_digest(folder / MODEL_FILE),
            groups=adopted.groups,
            layers=adopted.layers,
            positions="past",
            vocab_size=adopted.vocab,
            compute_dtype=adopted.compute_dtype,
            max_positions=adopted.max_positions,
            default_block_size=options.block_size,
            data_files=data_file_facts(folder, files, digests=True),
            source={"file": source.file.name, "digest": names.file_digest(source.file)},
        )
        verification: dict[str, Any] = {"verified": False, "reason": "not wanted"}
        if options.verify:
            progress("comparing with the source, one sequence at a time")
            packed = PackedModel(folder / MODEL_FILE, manifest, num_blocks=256, block_size=4)
            schedule = make_schedule(manifest.vocab_size, 48)
            result = compare(PagedOracle(source.file, manifest), packed, schedule, dtype=adopted.compute_dtype)
            if not result.passed:
                raise VerificationError(f"the model does not compute what {source.file} computes: {result.sentence()}")
            verification = {"verified": True, **result.to_dict()}
            progress(result.sentence())
        replace(manifest, verification=verification).save(folder)
    return Report(
        source=str(source.file),
        layers=adopted.reports,
        nodes_before=nodes,
        nodes_after=model.graph.num_nodes(),
        kv_bytes_per_token=kv_bytes_per_token(manifest),
        windows=tuple(g.window for g in adopted.groups),
        compute_dtype=adopted.compute_dtype,
        max_positions=adopted.max_positions,
        inputs_after=tuple(v.name or "" for v in model.graph.inputs),
        verification=verification,
    )
