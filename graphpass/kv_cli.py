"""Subcommands of `pagegraft` about cache types: calibrate and accuracy. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pagegraft.custom_ops.files import check_writable
from rich.console import Console

__all__ = ["print_caches", "register"]


def register(app: typer.Typer) -> None:
    """Adds the subcommands to the command line."""
    app.command("calibrate")(_calibrate)
    app.command("accuracy")(_accuracy)


def _calibrate(
    model: Annotated[Path, typer.Argument(help="A conversion whose caches are floats.", show_default=False)],
    text: Annotated[Path, typer.Argument(help="A text like what the model will read.", show_default=False)],
    kv_dtype: Annotated[str, typer.Option(help="int8, fp8 (float8e4m3fn) or int4.")] = "int8",
    kv_quant: Annotated[str, typer.Option(help="Scales per-channel or per-tensor.")] = "per-channel",
    out: Annotated[Path | None, typer.Option(help="File to write. Default: kv_scales.json in MODEL.")] = None,
) -> None:
    """Compute static scales for a quantised cache; use them by: pagegraft convert SOURCE OUT --kv-scales FILE."""
    from .calibrate import calibrate
    from .errors import KvCacheError
    from .kv_cache import form_of
    from .output import SCALES_FILE

    form = form_of(kv_dtype, kv_quant)
    if out is not None:
        check_writable(out, KvCacheError)
    with Console(stderr=True).status("running the model over the text"):
        scales = calibrate(model, text, form)
    out = model / SCALES_FILE if out is None else out
    scales.save(out)
    typer.echo(f"wrote {out}: {form.dtype} {kv_quant} scales of {len(scales.layers)} layers, from {scales.origin}")
    typer.echo(f"use them: pagegraft convert SOURCE OUT --kv-dtype {kv_dtype} --kv-scales {out}")


def _accuracy(
    model: Annotated[Path, typer.Argument(help="A conversion.", show_default=False)],
    against: Annotated[Path, typer.Option(help="Another conversion of the same source, with float caches.")],
    text: Annotated[Path | None, typer.Option(help="A text file. Default: the bundled text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what a cache type costs: logit error, greedy agreement, perplexity."""
    from .kv_cache import compare_caches

    with Console(stderr=True).status("measuring") as status:
        result = compare_caches(against, model, text, progress=lambda line: status.update(line))
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else result.sentence())


def print_caches(facts: dict[str, Any], console: Console) -> None:
    """What a conversion says of caches that it gave another type."""
    kind = facts["dtype"] if facts["quant"] == "NONE" else f"{facts['dtype']}, scales {facts['quant']}"
    console.print(f"caches store {kind}")
    if "verification" not in facts:
        console.print("not measured; compare with a float-cache conversion by: pagegraft accuracy OUT --against FLOAT")
    else:
        checked, measured = facts["verification"], facts["accuracy"]
        console.print(
            f"with them, logits typically within {checked['context_fraction']:.2%} of what the context changes (limit "
            f"{checked['context_limit']:.0%})"
        )
        console.print(
            f"against float caches over {measured['tokens']} tokens of {measured['text']}: greedy agreement "
            f"{measured['greedy_agreement']:.2%}, perplexity {measured['perplexity_change']:+.3%}, logit error "
            f"{measured['logit_error_rms']:.1e} (rms, of the logits' deviation)"
        )
