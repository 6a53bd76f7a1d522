"""Exceptions that pagegraft raises on purpose. Each message names the thing, the reason and the fix."""

from __future__ import annotations

__all__ = ["ContractError", "LibraryError", "ManifestError", "PagegraftError"]


class PagegraftError(Exception):
    """Base of every error that pagegraft raises on purpose; the command line prints it as one line."""


class ContractError(PagegraftError, ValueError):
    """Feeds, shapes or attributes that the PagedAttention contract does not allow."""


class LibraryError(PagegraftError, RuntimeError):
    """The compiled custom-op library is missing, or the installed onnxruntime cannot load it."""


class ManifestError(PagegraftError, ValueError):
    """A converted model's folder is incomplete, altered, or of a format this version cannot read."""
