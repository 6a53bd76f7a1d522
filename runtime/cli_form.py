"""The options of `pagegraft generate` that give the output a form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

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
    return StructuredOutputsParams(json=None if json_schema is None else _read(json_schema), regex=regex)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{path} cannot be read as text ({reason}); give a JSON schema") from None
