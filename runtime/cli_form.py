"""The options of `pagegraft generate` that give the output a form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ..custom_ops.files import read_text
from .engine.errors import ConfigurationError

if TYPE_CHECKING:
    from .sampling import StructuredOutputsParams

__all__ = ["JsonSchema", "Regex", "read_form"]

JsonSchema = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option("--json-schema", help="A file with the JSON schema that the output follows."),
]
Regex = Annotated[Optional[str], typer.Option("--regex", help="What the whole output matches.")]  # noqa: UP045


def read_form(json_schema: Path | None, regex: str | None) -> StructuredOutputsParams | None:
    """What the output is to look like; None for any text. Raises ConfigurationError or SamplingParamsError."""
    from .sampling import StructuredOutputsParams

    if json_schema is None and regex is None:
        return None
    schema = None if json_schema is None else read_text(json_schema, ConfigurationError, "give a JSON schema")
    return StructuredOutputsParams(json=schema, regex=regex)
