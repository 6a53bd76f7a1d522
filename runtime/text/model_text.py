"""Everything about text that a model's folder says: tokenizer, chat template, end-of-sequence, sampling defaults."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from .chat_template import ChatTemplate
from .errors import ChatTemplateError, TokenizerError
from .tokenizer import Tokenizer

__all__ = ["ModelText"]


class ModelText:
    """Reads a model's folder on demand: a model without a tokenizer runs on token ids, and the error comes with text.

    folder: holds tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json, config.json; any
    may be absent.
    chat_template: jinja2 text to use instead of the folder's templates. Raises ChatTemplateError when it is none.
    """

    def __init__(self, folder: Path, *, chat_template: str | None = None) -> None:
        self.folder = folder
        self._own_template = chat_template
        if chat_template is not None:
            ChatTemplate(chat_template)

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be read and written."""
        return (self.folder / "tokenizer.json").is_file()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError when there is none."""
        return Tokenizer.from_file(self.folder / "tokenizer.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """Content of tokenizer_config.json; empty when absent."""
        return self._json("tokenizer_config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Content of generation_config.json, as `SamplingParams.from_generation_config` takes it; empty when absent."""
        return self._json("generation_config.json")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, `pad_token`, `unk_token` and others that the folder names, as text."""
        named = {**self._json("special_tokens_map.json"), **self.tokenizer_config}
        texts = {key: _token_text(value) for key, value in named.items() if key.endswith("_token")}
        return {key: text for key, text in texts.items() if text is not None}

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output.

        Those of generation_config.json, or of config.json if it has none, and the tokenizer's `eos_token`: chat models
        often name the end of a turn in only one of the two places.
        """
        ids = _eos_ids(self.generation_config) or _eos_ids(self._json("config.json"))
        eos = self.special_tokens.get("eos_token")
        if eos is not None and self.has_tokenizer and (token_id := self.tokenizer.token_to_id(eos)) is not None:
            ids = ids | {token_id}
        return ids

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's template. Raises ChatTemplateError when there is none."""
        source = self._template_sources().get("default")
        if source is None:
            raise ChatTemplateError(
                f"{self.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "give a plain prompt instead, or a template of your own: --chat-template FILE"
            )
        return ChatTemplate(source, self.special_tokens)

    def chat_template_for(self, *, tools: bool) -> ChatTemplate:
        """The template for a conversation with or without tools: some models have a "tool_use" one beside the default.

        Raises ChatTemplateError when there is none.
        """
        if tools and "tool_use" in self._template_sources():
            return self.named_chat_template("tool_use")
        return self.chat_template

    def named_chat_template(self, name: str) -> ChatTemplate:
        """One of several templates that a model may have ("tool_use", "rag"). Raises ChatTemplateError."""
        sources = self._template_sources()
        if name not in sources:
            known = ", ".join(sorted(sources)) or "none"
            raise ChatTemplateError(f"{self.folder} has no chat template called {name!r}; it has {known}")
        return ChatTemplate(sources[name], self.special_tokens)

    def _template_sources(self) -> dict[str, str]:
        if self._own_template is not None:
            return {"default": self._own_template}
        sources: dict[str, str] = {}
        value = self.tokenizer_config.get("chat_template") or self._json("chat_template.json").get("chat_template")
        if isinstance(value, str):
            sources["default"] = value
        elif isinstance(value, list):
            sources |= {entry["name"]: entry["template"] for entry in value}
        if (path := self.folder / "chat_template.jinja").is_file():
            sources["default"] = path.read_text(encoding="utf-8")
        for path in sorted((self.folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
        return sources

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TokenizerError(f"{path} is not valid JSON: {error}; copy it again from the source model") from error
        if not isinstance(content, dict):
            raise TokenizerError(f"{path} holds no JSON object; copy it again from the source model")
        return content


def _token_text(value: object) -> str | None:
    # Either a string or an AddedToken's description.
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
