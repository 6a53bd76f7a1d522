"""Errors of the graph pass: a source that cannot be read, and a model that cannot be converted (and why)."""

from __future__ import annotations

from pagegraft.custom_ops.errors import PagegraftError

__all__ = [
    "KvCacheError",
    "NotConvertible",
    "OptionError",
    "OutputError",
    "SourceError",
    "SourceFailure",
    "VerificationError",
]


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


class SourceFailure(VerificationError):  # noqa: N818 (it is the source that failed)
    """onnxruntime does not load or run the source, so there is nothing to compare with."""


#: What to do about a refusal that does not say it itself, by its kind.
_HINTS = {
    "broken-source": "check that the source runs in onnxruntime, and export it again",
    "cache": "export with past and present of every layer, each read by its own attention alone",
    "fused": "export with the operators of ai.onnx, or with attention nodes that do without this",
    "interface": "export with input_ids, attention_mask, position_ids, past and present only",
    "layout": "please report this model; another exporter or opset may write it differently",
    "mask": "only causal, windowed and ALiBi masks can be paged",
    "score": "only a scale, a soft cap, ALiBi, a mask and sinks can be paged",
    "target": "use --target cpu",
}
_LAST_HINT = "please report this model"


class NotConvertible(PagegraftError, ValueError):  # noqa: N818 (reads as a verdict in reports)
    """A correct packed version of this model cannot be built; `reason`, `node` and `hint` say why and what to do.

    `kind` is a short stable word for reports and tests.
    """

    def __init__(self, reason: str, node: str = "", hint: str = "", *, kind: str = "unsupported") -> None:
        self.reason = reason
        self.node = node
        self.hint = hint = hint or _HINTS.get(kind, _LAST_HINT)
        self.kind = kind
        place = f" (node '{node}')" if node else ""
        super().__init__(f"cannot convert: {reason}{place}; {hint}")
