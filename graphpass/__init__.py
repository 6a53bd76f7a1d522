"""Rewrites every attention of an exported ONNX decoder into one PagedAttention node over packed tokens."""

from .errors import NotConvertible, OutputError, SourceError, VerificationError
from .options import ConvertOptions
from .passes import PagedAttentionPass
from .pipeline import convert, inspect, verify
from .report import Report

__all__ = [
    "ConvertOptions",
    "NotConvertible",
    "OutputError",
    "PagedAttentionPass",
    "Report",
    "SourceError",
    "VerificationError",
    "convert",
    "inspect",
    "verify",
]
