"""What tests of structured outputs share: a synthetic model over a real kind of tokenizer, and independent judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.text.small_tokenizers import MAKERS
from tests.wiring import synthetic

#: End-of-sequence of the small tokenizers: "</s>".
END = 1

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "maxItems": 3},
        "home": {"type": "object", "properties": {"open": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def build(folder: Path, kind: str = "byte_level") -> Path:
    """A synthetic model with a tokenizer of that kind, a chat template and an end-of-sequence."""
    backend = MAKERS[kind]()
    synthetic.build(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": synthetic.CHAT_TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "do_sample": False}))
    return folder


def is_person(text: str) -> bool:
    """Whether a text is JSON that PERSON allows, by its words and not by a library."""
    value = json.loads(text)
    if not isinstance(value, dict) or not {"name", "age", "tags"} <= value.keys() <= PERSON["properties"].keys():
        return False
    home = value.get("home", {})
    return (
        isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and isinstance(value["tags"], list)
        and len(value["tags"]) <= 3
        and all(tag in ("red", "green", None) or (type(tag) is int and tag == 3) for tag in value["tags"])
        and isinstance(home, dict)
        and home.keys() <= {"open"}
        and all(type(v) is bool for v in home.values())
    )
