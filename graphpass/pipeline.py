"""Converts a source model into a folder that the runtime loads, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pagegraft.custom_ops import manifest as names

from .adopt import adopt_paged, is_paged
from .bisect import first_difference
from .errors import KvCacheError, NotConvertible, SourceFailure, VerificationError
from .genai import write_genai_config
from .kv_cache import KvRequest, change_caches, kept_graph, kv_bytes_per_token, measure_caches, read_request
from .loadable import blaming_broken_sources, check_runs
from .normalise import Source, find_model, load, normalise
from .options import ConvertOptions
from .oracle import source_model
from .output import MODEL_FILE, check_output, data_file_facts, new_folder, write_model
from .packed import PackedModel
from .paged_source import convert_paged
from .passes import Analysis, analyse, rewrite
from .report import Refusal, Report, describe
from .requantise_effect import requantise_effect
from .rewrite.targets import target_notes
from .slices import LayerOracle, source_slices, verify_slices
from .source_facts import longest_context, read_json, too_large_to_run, verification_lengths
from .texts import bundled_text
from .verify import Verification, accuracy_key, compare, make_schedule

__all__ = ["convert", "inspect", "verify"]

Progress = Callable[[str], None]

#: Data files above this are not digested: the copy is a plain copy, and reading it again would double the time.
_LARGEST_DIGESTED = 1 << 30


def _silent(_: str) -> None:
    pass


def inspect(source: Path | str, options: ConvertOptions | None = None) -> Report:
    """Says whether and how a model can be converted; writes nothing.

    Raises SourceError for what is no readable model; a model that cannot be converted gives a report with `refusal`.
    """
    options = options or ConvertOptions()
    found = find_model(Path(source))
    model = load(found)
    nodes = model.graph.num_nodes()
    try:
        if is_paged(model):
            adopted = adopt_paged(model)
            return Report(source=str(found.file), nodes_before=nodes, layers=adopted.reports)
        analysis = _analysed(model, found, options)
        check_runs(found, analysis)
    except NotConvertible as error:
        return Report(source=str(found.file), nodes_before=nodes, refusal=Refusal.of(error))
    return describe(str(found.file), analysis, nodes_before=nodes)


def convert(
    source: Path | str, out: Path | str, options: ConvertOptions | None = None, *, progress: Progress = _silent
) -> Report:
    """Converts the model at `source` (a folder or an .onnx file) into the new folder `out`.

    An earlier conversion at `out` is replaced; a folder with anything else in it, or the source, never is.
    Raises SourceError, OutputError, KvCacheError, NotConvertible or VerificationError; nothing is written then.
    """
    options = options or ConvertOptions()
    found, out, request = find_model(Path(source)), Path(out).resolve(), read_request(options)
    check_output(out, found)
    progress(f"reading {found.file.name}")
    model = load(found)
    if is_paged(model):
        if request is not None:
            raise KvCacheError(f"{found.file} is paged already and its caches stay as they are: leave out --kv-dtype")
        with _nothing_written():
            return convert_paged(found, out, model, options, progress)
    nodes = model.graph.num_nodes()
    progress("recognising attention")
    analysis = _analysed(model, found, options)
    if options.verify:
        check_runs(found, analysis)
    report = describe(str(found.file), analysis, nodes_before=nodes)
    sliced = options.verify and too_large_to_run(found)
    oracles = source_slices(analysis, progress=progress) if sliced else []
    progress(f"rewriting {len(analysis.sites)} attentions")
    layers = rewrite(model, analysis, options.target)
    with _nothing_written(), new_folder(out) as folder:
        progress("writing the converted model")
        files = write_model(model, found, folder, link=options.link)
        manifest = _manifest(found, folder, files, analysis, layers, options)
        verification = _verification(found, folder, manifest, analysis, options, oracles, progress)
        if request is not None:
            manifest, verification["kv_cache"] = _change_caches(
                found,
                folder,
                manifest,
                request,
                analysis,
                replace(options, verify=options.verify and not sliced),
                progress,
            )
        if options.target == "ort-cuda":
            site = analysis.sites[0]
            config = read_json(found.folder / "config.json")
            width = site.heads * site.query.size
            write_genai_config(folder, manifest, config, heads=site.heads, hidden_size=config.get("hidden_size", width))
        replace(manifest, verification=verification).save(folder)
    return replace(
        report,
        notes=(*report.notes, *target_notes(analysis, options.target)),
        kv_bytes_per_token=kv_bytes_per_token(manifest),
        nodes_after=model.graph.num_nodes(),
        inputs_after=tuple(v.name or "" for v in model.graph.inputs),
        verification=verification,
    )


def _verification(
    source: Source,
    folder: Path,
    manifest: names.Manifest,
    analysis: Analysis,
    options: ConvertOptions,
    oracles: Sequence[LayerOracle],
    progress: Progress,
) -> dict[str, Any]:
    """What the manifest says of a new conversion's verification: by slices when there are `oracles`, else as a whole.

    Raises VerificationError.
    """
    if not options.verify:
        return {"verified": False, "reason": "not wanted"}
    if oracles:
        checked = verify_slices(oracles, folder, manifest, accuracy=analysis.accuracy, progress=progress)
        return {"verified": True, **checked}
    checked = _verify(source, folder, manifest, analysis, options, progress).to_dict()
    if analysis.requantised:
        checked["requantised"] = requantise_effect(source, analysis, folder, progress=progress)
    return {"verified": True, **checked}


@contextmanager
def _nothing_written() -> Iterator[None]:
    """Says of a failed verification what it means for a conversion."""
    try:
        yield
    except VerificationError as error:
        advice = "check the source" if isinstance(error, SourceFailure) else "please report this model"
        raise type(error)(f"{error}; nothing was written: {advice}") from None


def _manifest(
    source: Source,
    folder: Path,
    files: list[str],
    analysis: Analysis,
    layers: tuple[names.CacheLayer, ...],
    options: ConvertOptions,
) -> names.Manifest:
    small = all((folder / name).stat().st_size <= _LARGEST_DIGESTED for name in files)
    return names.Manifest(
        model_file=MODEL_FILE,
        graph_digest=names.file_digest(folder / MODEL_FILE),
        groups=analysis.groups,
        layers=layers,
        positions=analysis.positions,
        vocab_size=analysis.logits.vocab,
        compute_dtype=str(analysis.compute_dtype.numpy()),
        max_positions=analysis.max_positions,
        default_block_size=options.block_size,
        target=options.target,
        data_files=data_file_facts(folder, files, digests=small),
        source={
            "file": source.file.name,
            "digest": names.file_digest(source.file),
            **({"requantised": analysis.requantised} if analysis.requantised else {}),
        },
    )


def _change_caches(
    source: Source,
    folder: Path,
    manifest: names.Manifest,
    request: KvRequest,
    analysis: Analysis,
    options: ConvertOptions,
    progress: Progress,
) -> tuple[names.Manifest, dict[str, Any]]:
    """Changes the caches' type; with `options.verify`, verifies the result against the source and measures it on the
    bundled text.
    """
    facts: dict[str, Any] = {"dtype": request.form.dtype, "quant": request.form.quant}
    with kept_graph(folder, manifest) as before:
        changed = change_caches(folder, manifest, request, progress=progress)
        if options.verify:
            facts["verification"] = _verify(source, folder, changed, analysis, options, progress).to_dict()
            text = bundled_text("evaluation", folder, manifest.vocab_size)
            after = folder / MODEL_FILE
            facts["accuracy"] = measure_caches((before, manifest), (after, changed), text, progress=progress).to_dict()
    return changed, facts


def verify(source: Path | str, folder: Path | str, options: ConvertOptions | None = None) -> Verification:
    """Compares an already converted model with its source again.

    Raises VerificationError, with the first attention that differs, when it does not compute what the source computes.
    """
    options = options or ConvertOptions()
    found, folder = find_model(Path(source)), Path(folder)
    manifest = names.Manifest.load(folder)
    options = replace(options, requantize=options.requantize or bool(manifest.source.get("requantised")))
    model = load(found)
    if is_paged(model):
        raise VerificationError(f"{found.file} is paged already: there is nothing else to compare its attentions with")
    return _verify(found, folder, manifest, _analysed(model, found, options), options)


def _analysed(model: ir.Model, source: Source, options: ConvertOptions) -> Analysis:
    """Normalises a source's model in place and analyses it."""
    with blaming_broken_sources(source):
        normalise(model, requantize=options.requantize)
        return analyse(model, options, max_positions=longest_context(source, options))


def _verify(
    source: Source,
    folder: Path,
    manifest: names.Manifest,
    analysis: Analysis,
    options: ConvertOptions,
    progress: Progress = _silent,
) -> Verification:
    longest, stretch = verification_lengths(analysis, source, manifest.max_positions)
    # Small blocks, so that even short windows span several.
    packed = PackedModel(folder / MODEL_FILE, manifest, num_blocks=8 + 3 * longest + stretch // 4, block_size=4)
    schedule = make_schedule(analysis.token_count, longest, stretch=stretch)
    kind = accuracy_key(analysis.accuracy, manifest)
    sourced = partial(source_model, source, analysis, folder, longest=longest)
    with sourced() as oracle:
        nudged = None if analysis.pages is not None else partial(sourced, nudged=True)
        result = compare(oracle, packed, schedule, dtype=kind, nudged=nudged, progress=progress)
    if not result.passed:
        unedited = _analysed(load(source), source, options)
        where = first_difference(
            unedited, folder, manifest, max(schedule.sequences, key=len), tolerance=10 * result.tolerance
        )
        place = where.sentence() if where is not None else "all attentions agree by themselves"
        raise VerificationError(
            f"the converted model does not compute what {source.file} computes ({result.sentence()}); {place}"
        )
    if result.leans_on_noise and kind == analysis.accuracy:  # other caches: compared before they were changed
        slices = source_slices(_analysed(load(source), source, options), progress=progress)
        alone = verify_slices(slices, folder, manifest, accuracy=kind, progress=progress)
        result = replace(result, attention_difference=alone["difference"])
    progress(result.sentence())
    return result
