"""What a caller may ask of the form of an output: names as in vLLM. `grammar.py` makes something of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any

from .errors import SamplingParamsError

__all__ = ["MAX_CONSTRAINT_CHARACTERS", "StructuredOutputsParams"]

#: Longest constraint. The recursion of the library that compiles it, and so its stack, is bounded by this.
MAX_CONSTRAINT_CHARACTERS = 65_536

#: Longest regular expression, patterns of a schema included, and longest grammar: a chain of optional parts is compiled
#: in time and memory of its length's square.
_MAX_REGEX_CHARACTERS = 4096
_MAX_GRAMMAR_CHARACTERS = 8192

#: Largest multipleOf, as a whole number without its decimal point: its automaton has as many states.
_MAX_MULTIPLE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """What the whole output must be. Exactly one of:

    json: a JSON document that a JSON schema allows (the schema as mapping, or as JSON text).
    regex: a text that a regular expression matches from its first to its last character; in the syntax of Rust's
        `regex` without look-around, so that `\\d` is any digit of Unicode and `[0-9]` a digit of ASCII.
    choice: one of these strings.
    grammar: a text of a grammar in llguidance's variant of Lark, whose first rule is `start`.
    json_object: True: any JSON object.

    `json` is kept as JSON text, so that the value is immutable and hashable.
    Raises SamplingParamsError for none, several, a wrong type, or what is too large.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        """Brings the constraint into its kept form and checks it."""
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if "json_object" in given and self.json_object is not True:
            if self.json_object is not False:
                raise SamplingParamsError(
                    f"structured_outputs.json_object is {self.json_object!r}; it can only be true"
                )
            given.remove("json_object")
        if len(given) != 1:
            raise SamplingParamsError(
                f"structured_outputs has {', '.join(given) or 'no constraint'}; give exactly one of "
                "json, regex, choice, grammar and json_object"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None and (not isinstance(value, str) or not value):
                raise SamplingParamsError(f"structured_outputs.{name} is {value!r:.80}; it must be a string, not empty")
        if self.grammar is not None and "%json" in self.grammar:
            raise SamplingParamsError("structured_outputs.grammar holds %json; give a schema as json instead")
        _check_text(given[0], self)

    @classmethod
    def from_fields(cls, given: object) -> StructuredOutputsParams:
        """From a JSON object with these names. Raises SamplingParamsError for an unknown one as well."""
        if not isinstance(given, Mapping):
            raise SamplingParamsError(f"structured_outputs is {given!r:.80}; it must be an object")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(str(key) for key in given if key not in known):
            raise SamplingParamsError(f"structured_outputs has {unknown[0]!r:.80}; known are {', '.join(known)}")
        return cls(**given)


def _check_text(name: str, params: StructuredOutputsParams) -> None:
    texts = params.choice or (params.json, params.regex, params.grammar)
    text = "".join(str(t) for t in texts if t is not None)
    limits = {"regex": _MAX_REGEX_CHARACTERS, "grammar": _MAX_GRAMMAR_CHARACTERS}
    _check_length(f"structured_outputs.{name}", text, limits.get(name, MAX_CONSTRAINT_CHARACTERS))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SamplingParamsError(f"structured_outputs.{name} is not Unicode text: half of a surrogate pair") from None


def _check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise SamplingParamsError(f"{name} has {len(text)} characters; at most {limit} are taken")


def _schema_text(schema: object) -> str:
    """The schema as compact JSON text."""
    try:
        if isinstance(schema, str):
            _check_length("structured_outputs.json", schema, 4 * MAX_CONSTRAINT_CHARACTERS)  # spaces go
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise SamplingParamsError(f"structured_outputs.json is {schema!r:.80}; it must be a JSON schema, an object")
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        _check_parts(schema)
    except RecursionError:
        raise SamplingParamsError("structured_outputs.json is nested too deeply; define parts in $defs") from None
    except SamplingParamsError:
        raise
    except (TypeError, ValueError) as error:
        raise SamplingParamsError(f"structured_outputs.json is no JSON: {error}") from None
    return text


def _check_parts(schema: object) -> None:
    """Refuses what would be compiled into an automaton of millions of states."""
    if isinstance(schema, Mapping):
        patterns = schema.get("patternProperties")
        for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())):
            if isinstance(pattern, str):
                _check_length("a pattern of structured_outputs.json", pattern, _MAX_REGEX_CHARACTERS)
        value = schema.get("multipleOf")
        if isinstance(value, (int, float)) and _digits(value) > _MAX_MULTIPLE:
            raise SamplingParamsError(
                f"structured_outputs.json has multipleOf {value!r:.40}; without its decimal point it may be at most "
                f"{_MAX_MULTIPLE}"
            )
        schema = list(schema.values())
    if isinstance(schema, (list, tuple)):
        for part in schema:
            _check_parts(part)


def _digits(value: float) -> int:
    """The digits of a number as a whole number: 1234 of 12.34, and 1000 of 1e3."""
    try:
        number = abs(Decimal(str(value))).normalize()
        exponent = number.as_tuple().exponent
        return _MAX_MULTIPLE + 1 if number.adjusted() > 8 else int(number.scaleb(-min(0, int(exponent))))
    except (InvalidOperation, ValueError):
        return _MAX_MULTIPLE + 1


def _choices(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise SamplingParamsError(
            f"structured_outputs.choice is {value!r:.80}; it must be a list of strings that are not empty"
        )
    return tuple(texts)
