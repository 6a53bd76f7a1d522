"""Chat messages to a prompt, by the model's own jinja2 template in a sandbox.

The environment is the one templates are written for (transformers' `apply_chat_template`): trimmed blocks, loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and a `generation` block that only marks
text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ChatTemplateError

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]

_END_OF_FINAL = "\ue000end of the final message\ue000"  # private-use characters: no text has them by chance


class ChatTemplate:
    """A compiled chat template.

    source: the jinja2 text.
    variables: what every rendering may use besides its own arguments: `bos_token`, `eos_token` and the like.

    Raises ChatTemplateError when the text is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is not valid jinja2: {error.message} (line {error.lineno}); "
                "correct it (the model's is in its tokenizer_config.json or chat_template.jinja), or pass another one"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. Encode it without special tokens: the template writes them itself.

        messages: each with "role" and "content", and whatever else the template knows ("tool_calls", ...). Arguments
            of tool calls may be JSON text, as in OpenAI's API; templates get them as objects.
        tools: JSON schemas of functions, as in OpenAI's API.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end within the last message instead, so that the model goes on with it.
        variables: further switches of the template (e.g. `enable_thinking=False`).

        Raises ChatTemplateError when the template refuses the conversation or fails on it.
        """
        _check(messages)
        try:
            turns = [_with_argument_objects(_plain(message)) for message in messages]
            given = _plain({"tools": tools, "documents": documents, **variables})
        except RecursionError:
            raise ChatTemplateError(
                "messages, tools or template variables are nested too deeply to be read; flatten them"
            ) from None
        context = {**self._variables, "add_generation_prompt": add_generation_prompt, **given, "messages": turns}
        if not continue_final_message:
            return self._render(context)
        content = turns[-1].get("content")
        if not isinstance(content, str) or not content:
            raise ChatTemplateError("continue_final_message needs a last message with text; give it some content")
        turns[-1]["content"] = content.rstrip() + _END_OF_FINAL
        text = self._render({**context, "add_generation_prompt": False})
        if _END_OF_FINAL not in text:
            raise ChatTemplateError(
                "the model's chat template changes or leaves out the last message, so it cannot be continued; "
                "leave continue_final_message out"
            )
        # Templates trim messages as they see fit, so the trailing space is the caller's to decide.
        return text[: text.rindex(_END_OF_FINAL)] + content[len(content.rstrip()) :]

    def _render(self, context: dict[str, Any]) -> str:
        try:
            return self._template.render(context)
        except ChatTemplateError:
            raise
        except SecurityError as error:
            raise ChatTemplateError(
                f"the model's chat template was stopped by the sandbox: {error}; use a template that does not need it"
            ) from error
        except Exception as error:  # a template's own code may raise anything
            raise ChatTemplateError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}; "
                "check roles and content against what the model expects"
            ) from error


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise ChatTemplateError(
            f"a chat needs a list of messages with at least one, not {messages!r:.60}; "
            'pass e.g. [{"role": "user", "content": "Hello"}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ChatTemplateError(
                f'message {index} of the chat is {message!r:.60}; it must be an object with a "role"'
            )


def _plain(value: Any) -> Any:
    """The value rebuilt from JSON's own types.

    A template is a stranger's program: it gets no methods of the caller's objects, and cannot change what it is given.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise ChatTemplateError(
        f"messages, tools and template variables must be JSON values, and {value!r:.60} is a {type(value).__name__}; "
        "convert it first"
    )


def _with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects where they are JSON text of one."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                continue
            if isinstance(arguments, dict):
                function["arguments"] = arguments
    return message


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes characters that matter in HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block to its content, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
