"""Exports SmolLM2-135M-Instruct, or a Llama GGUF of your own, to an ordinary ONNX decoder; see README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pagegraft.custom_ops.errors import PagegraftError
from pagegraft.runtime.demo.cache import default_cache_dir
from pagegraft.runtime.demo.export import export_gguf, export_smollm2
from pagegraft.runtime.demo.progress import terminal_progress
from rich.console import Console


def main(
    gguf: Annotated[Path | None, typer.Option(help="Export this Llama GGUF instead of SmolLM2.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to: with --gguf a new folder, else a cache folder.")] = None,
) -> None:
    """Write the ONNX model and print its folder."""
    console = Console(stderr=True)
    try:
        with terminal_progress(console) as progress:
            if gguf is None:
                folder = export_smollm2(out or default_cache_dir(), progress=progress)
            else:
                folder = export_gguf(gguf, out or gguf.with_suffix(".onnx"), progress=progress)
    except PagegraftError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    print(folder)


if __name__ == "__main__":
    typer.run(main)
