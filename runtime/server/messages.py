"""The messages of a chat as templates take them: roles that OpenAI knows, content as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import ApiError

__all__ = ["check_tool_choice", "plain_messages"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
#: An answer may be tool calls alone, and a tool may have nothing to say.
_MAY_BE_EMPTY = {"assistant", "tool", "function"}


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with content as text. Raises ApiError for a role or content that a model of text cannot take."""
    return [_plain(index, message) for index, message in enumerate(messages)]


def check_tool_choice(choice: str | dict[str, Any] | None) -> None:
    """Raises ApiError for a choice that would have to force a call."""
    if choice not in (None, "auto", "none"):
        raise ApiError(
            f"tool_choice is {choice!r:.100}; the model itself chooses whether to call a tool here: give auto or none",
            param="tool_choice",
        )


def _plain(index: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        reason = "has no role" if role is None else f"has the role {role!r:.60}"
        raise ApiError(f"message {index} {reason}; it must be one of {', '.join(_ROLES)}", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None and role in _MAY_BE_EMPTY:
        return {**message, "content": ""}  # templates add it to other strings
    if not isinstance(content, list):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ApiError(
            f"the content of message {index} ({role}) is {kind}; it must be a text or a list of parts", param="messages"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            given = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(f"content of type {given!r:.60} is not supported: this model reads text", param="messages")
        texts.append(str(part.get("text", "")))
    return {**message, "content": "".join(texts)}
