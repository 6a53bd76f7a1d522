"""Exceptions of the sampling package."""

from __future__ import annotations

from ...custom_ops.errors import PagegraftError

__all__ = ["SamplingError", "SamplingParamsError"]


class SamplingParamsError(PagegraftError, ValueError):
    """A sampling parameter that is out of range, or that contradicts another one or the model.

    param: its name, where one is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SamplingError(PagegraftError, RuntimeError):
    """One row of logits from which no token can be drawn; the other rows of the step are unaffected."""
