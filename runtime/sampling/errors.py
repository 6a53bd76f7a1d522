"""Exceptions of the sampling package."""

from __future__ import annotations

from ...custom_ops.errors import PagegraftError

__all__ = ["SamplingError", "SamplingParamsError"]


class SamplingParamsError(PagegraftError, ValueError):
    """A sampling parameter that is out of range, or that contradicts another one or the model."""


class SamplingError(PagegraftError, RuntimeError):
    """One row of logits from which no token can be drawn; the other rows of the step are unaffected."""
