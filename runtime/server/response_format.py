"""OpenAI's `response_format` and vLLM's `structured_outputs`: the form that an answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sampling import StructuredOutputsParams
from .errors import ApiError

__all__ = ["structured_outputs"]

_FORM = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'


def structured_outputs(
    response_format: dict[str, Any] | None, given: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """What a body asks for in either of the two fields; None when any text will do.

    `name`, `description` and `strict` of a schema change nothing: the answer always follows it.
    Raises ApiError, or SamplingParamsError for a constraint that is malformed.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if given is not None:
        if kind != "text":
            raise ApiError(
                "response_format and structured_outputs exclude each other; give one", param="response_format"
            )
        return StructuredOutputsParams.from_fields(given)
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise ApiError(
            f"response_format has the type {kind!r:.80}; it can be text, json_object or json_schema",
            param="response_format",
        )
    described = response_format.get("json_schema")
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        raise ApiError(f"response_format holds no schema; it must look like {_FORM}", param="response_format")
    return StructuredOutputsParams(json=described["schema"])
