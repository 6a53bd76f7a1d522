"""The error of the demo: a model that cannot be fetched, read or exported."""

from __future__ import annotations

from ...custom_ops.errors import PagegraftError

__all__ = ["DemoError"]


class DemoError(PagegraftError, RuntimeError):
    """The demo's model cannot be downloaded, read or exported; the message says what to do."""
