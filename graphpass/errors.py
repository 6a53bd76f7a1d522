"""Errors of the graph pass: a source that cannot be read, and a model that cannot be converted (and why)."""

from __future__ import annotations

from pagegraft.custom_ops.errors import PagegraftError

__all__ = ["KvCacheError", "NotConvertible", "OptionError", "OutputError", "SourceError", "VerificationError"]


class SourceError(PagegraftError, ValueError):
    """The source folder or file is not a readable ONNX model."""


class OptionError(PagegraftError, ValueError):
    """Options of a conversion that cannot work."""


class OutputError(PagegraftError, ValueError):
    """The output folder cannot be used."""


class KvCacheError(PagegraftError, ValueError):
    """A way to store the caches that does not exist, or scales that do not belong to the model."""


class VerificationError(PagegraftError, ValueError):
    """The converted model does not compute what its source computes."""


class NotConvertible(PagegraftError, ValueError):  # noqa: N818 (reads as a verdict in reports)
    """A correct packed version of this model cannot be built; `reason`, `node` and `hint` say why and what to do.

    `kind` is a short stable word for reports and tests.
    """

    def __init__(self, reason: str, node: str = "", hint: str = "", *, kind: str = "unsupported") -> None:
        self.reason = reason
        self.node = node
        self.hint = hint
        self.kind = kind
        place = f" (node '{node}')" if node else ""
        advice = f"; {hint}" if hint else ""
        super().__init__(f"cannot convert: {reason}{place}{advice}")
