"""Subcommands of `pagegraft` that belong to graphpass: convert and inspect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pagegraft.custom_ops.errors import PagegraftError
from pagegraft.custom_ops.files import check_writable
from rich.console import Console

from . import kv_cli

if TYPE_CHECKING:
    from .options import ConvertOptions
    from .report import Report

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to the command line."""
    app.command("convert")(_convert)
    app.command("inspect")(_inspect)
    kv_cli.register(app)


def _convert(
    source: Annotated[Path, typer.Argument(help="Folder of an exported model, or its .onnx file.")],
    out: Annotated[
        Path,
        typer.Argument(help="Folder for the converted model: a new one, or an earlier conversion, which is replaced."),
    ],
    fuse: Annotated[
        bool, typer.Option(help="Take rotary embedding, q/k norm and the split of QKV into the op where proven equal.")
    ] = True,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Quantise activations per token where the source does per tensor.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Compare with the source model before the folder appears.")] = True,
    link: Annotated[bool, typer.Option(help="Hard-link the source's data files instead of copying them.")] = False,
    max_positions: Annotated[int | None, typer.Option(help="Longest context in tokens.")] = None,
    block_size: Annotated[int, typer.Option(help="Default block size for the runtime.")] = 16,
    target: Annotated[
        str, typer.Option(help="cpu (pagegraft's runtime), ort-cuda (stock onnxruntime CUDA) or ascend.")
    ] = "cpu",
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="What the caches store: float32, float16, bfloat16, int8, int4 or fp8 (float8e4m3fn)."),
    ] = None,
    kv_quant: Annotated[
        str | None,
        typer.Option(help="Scales per-token (int8, its default), per-channel (default of int4 and fp8) or per-tensor."),
    ] = None,
    kv_scales: Annotated[
        Path | None, typer.Option(help="Static scales, a file of pagegraft calibrate. Default: from a bundled text.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write the report, each layer by itself, as JSON to this file.")
    ] = None,
) -> None:
    """Convert an exported ONNX decoder into a paged one."""
    from .errors import OutputError
    from .options import ConvertOptions

    # A report inside the new folder has its place only once the model is converted.
    if report is not None and out.resolve() not in report.resolve().parents:
        check_writable(report, OutputError)
    if target not in ("cpu", "ort-cuda", "ascend"):
        raise typer.BadParameter(f"{target} is none of cpu, ort-cuda, ascend", param_hint="--target")
    options = ConvertOptions(
        target=target,  # type: ignore[arg-type]
        fuse=fuse,
        requantize=requantize,
        verify=verify,
        link=link,
        max_positions=max_positions,
        block_size=block_size,
        kv_dtype=kv_dtype,
        kv_quant=kv_quant,
        kv_scales=kv_scales,
    )
    result = _with_progress(source, out, options)
    if report is not None:
        report.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    _print_summary(result, out)


def _with_progress(source: Path, out: Path, options: ConvertOptions) -> Report:
    """Converts; an interrupt says what became of it and ends the command."""
    from .pipeline import convert

    before = _identity(out)
    try:
        with Console(stderr=True).status("starting") as status:
            return convert(source, out, options, progress=lambda text: status.update(text))
    except KeyboardInterrupt:
        written = "nothing was written" if _identity(out) == before else f"{out} was complete already"
        typer.echo(f"pagegraft: interrupted; {written}", err=True)
        raise typer.Exit(130) from None


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from one that took its place; None when there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _print_summary(result: Report, out: Path) -> None:
    from .tables import layer_lines

    console = Console(soft_wrap=True, highlight=False)
    for line in layer_lines(result.layers):
        console.print(line, markup=False)
    console.print(
        f"{result.nodes_before} nodes became {result.nodes_after}; {_bytes(result.kv_bytes_per_token)} of KV a token"
    )
    checked = result.verification
    if "scope" in checked:
        console.print(f"verified by {checked['scope']}; attention within {checked['difference']:.1e} of its deviation")
    elif checked.get("verified"):
        console.print(
            f"verified against the source: {checked['tokens']} tokens of {checked['sequences']} sequences, logits "
            f"within {checked['difference']:.1e} of their deviation and {checked['context_fraction']:.2%} of what the "
            "context changes"
        )
    else:
        console.print("not verified (--no-verify)")
    if "requantised" in checked:
        console.print(_effect(checked["requantised"]))
    if "kv_cache" in checked:
        kv_cli.print_caches(checked["kv_cache"], console)
    for note in result.notes:
        console.print(f"note: {note}")
    console.print(f"wrote {out}")


def _effect(facts: Mapping[str, Any]) -> str:
    chunks = facts["source_by_chunks_rms"]
    itself = f"; the source differs from itself by {chunks:.1%} when its tokens come in chunks" if chunks else ""
    return (
        f"against the source with activations quantised per tensor: logits differ by {facts['logit_error_rms']:.1%} of "
        f"their deviation (rms), {facts['greedy_agreement']:.1%} greedy agreement over {facts['tokens']} tokens{itself}"
    )


def _bytes(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} bytes"


def _inspect(
    source: Annotated[Path, typer.Argument(help="A model, or a folder of models.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[Path | None, typer.Option(help="Also write the reports as JSON to this file.")] = None,
    max_positions: Annotated[int | None, typer.Option(help="Longest context in tokens.")] = None,
    requantize: Annotated[bool, typer.Option("--requantize", help="As convert would with --requantize.")] = False,
) -> None:
    """Say whether models can be converted, and if not why. Exit status 1 when one cannot."""
    from .errors import OutputError
    from .options import ConvertOptions
    from .pipeline import inspect
    from .tables import model_table

    if report is not None:
        check_writable(report, OutputError)
    options = ConvertOptions(max_positions=max_positions, requantize=requantize)
    models, without = _models(source)
    results: list[dict[str, Any]] = []
    with Console(stderr=True).status("inspecting") as status:
        for path in models:
            status.update(f"inspecting {path.name}")
            try:
                results.append({"model": path.name, **inspect(path, options).to_dict()})
            except PagegraftError as error:
                if len(models) == 1:
                    raise
                refusal = {"kind": "source", "reason": str(error), "node": "", "hint": ""}
                results.append({"model": path.name, "convertible": False, "refusal": refusal, "layers": []})
    text = json.dumps(results, indent=2)
    if report is not None:
        report.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        Console().print(model_table(results))
    if without:
        typer.echo(f"{without} folder{'s' if without > 1 else ''} without a model left out", err=True)
    if not all(r["convertible"] for r in results):
        raise typer.Exit(1)


def _models(source: Path) -> tuple[list[Path], int]:
    """The source itself, or the models among the folders of one that holds none, and how many others it has."""
    if not source.is_dir() or _holds_model(source):
        return [source], 0
    folders = sorted(p for p in source.iterdir() if p.is_dir())
    found = [p for p in folders if _holds_model(p)]
    return (found, len(folders) - len(found)) if found else ([source], 0)


def _holds_model(folder: Path) -> bool:
    return any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx"))
