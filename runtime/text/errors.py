"""Exceptions of the text package."""

from __future__ import annotations

from ...custom_ops.errors import PagegraftError

__all__ = ["ChatTemplateError", "TokenizerError"]


class TokenizerError(PagegraftError, ValueError):
    """Text was needed, but the model's folder has no usable tokenizer, or the text or ids do not suit it."""


class ChatTemplateError(PagegraftError, ValueError):
    """The model has no chat template, or its template refuses or fails on the messages."""
