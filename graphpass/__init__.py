"""Rewrites every attention of an exported ONNX decoder into one PagedAttention node over packed tokens."""

from pagegraft.custom_ops import __version__

from .errors import NotConvertible, OptionError, OutputError, SourceError, VerificationError
from .options import ConvertOptions
from .passes import PagedAttentionPass
from .pipeline import convert, inspect, verify
from .report import Report

__all__ = [
    "ConvertOptions",
    "NotConvertible",
    "OptionError",
    "OutputError",
    "PagedAttentionPass",
    "Report",
    "SourceError",
    "VerificationError",
    "__version__",
    "convert",
    "inspect",
    "verify",
]
