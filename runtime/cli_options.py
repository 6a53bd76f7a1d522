"""Options that several subcommands of runtime share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..custom_ops.files import read_text
from .engine.errors import ConfigurationError

__all__ = [
    "Budget",
    "ChatTemplateFile",
    "Debug",
    "Device",
    "KvMemory",
    "MaxTokens",
    "Model",
    "Seed",
    "Sequences",
    "Speculate",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "read_template",
]

Model = Annotated[Path, typer.Argument(help="Folder that `pagegraft convert` wrote.", show_default=False)]
KvMemory = Annotated[
    Optional[str],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option("--kv-memory", help="Memory for the caches, like 512MB or 2GiB. Default: 40 % of what is free."),
]
Threads = Annotated[Optional[int], typer.Option("--threads", help="Threads of the model. Default: one a core.")]  # noqa: UP045
Budget = Annotated[int, typer.Option("--max-num-batched-tokens", help="Tokens that one step computes at most.")]
Sequences = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-num-seqs", help="Sequences that run at once at most. Default: 128, or the tokens of a step."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Output tokens at most.")]
Temperature = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--temperature", help="0 is greedy. Default: the model's generation_config.json, else 1."),
]
TopP = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--top-p", help="Keep the likeliest tokens up to this mass. Default: the model's, else all."),
]
TopK = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--top-k", help="Keep so many of the likeliest tokens. Default: the model's, else all."),
]
Seed = Annotated[Optional[int], typer.Option("--seed", help="Makes sampled output reproducible.")]  # noqa: UP045
Debug = Annotated[bool, typer.Option("--debug", help="Check all accounting after each step.")]
Device = Annotated[
    str,
    typer.Option("--device", help="cpu (onnxruntime), npu (Ascend, through torch_npu), or torch (torch's CPU)."),
]
Speculate = Annotated[
    int,
    typer.Option(
        "--speculative-tokens", help="Tokens guessed from the context and verified in a step; the output is the same."
    ),
]
ChatTemplateFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--chat-template", help="A jinja2 file to use instead of the model's own template."),
]


def read_template(path: Path | None) -> str | None:
    """The text of a chat template's file. Raises ConfigurationError when it cannot be read."""
    return None if path is None else read_text(path, ConfigurationError, "give a jinja2 file")
